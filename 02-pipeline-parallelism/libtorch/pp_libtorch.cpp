#include "pp_libtorch.hpp"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <stdexcept>

#include "fived/math/partition.hpp"

namespace fived {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

struct DeferredProduct : Function<DeferredProduct> {
    static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                              const DeferredPtr& deferred) {
        context->save_for_backward({x, weight});
        keep(context, deferred);
        return at::linear(x, weight);
    }
    static Tensors backward(AutogradContext* context, const Tensors& gradients) {
        const Tensors saved = context->get_saved_variables();
        const at::Tensor x = saved[0], weight = saved[1], dy = gradients[0];
        const at::Tensor dx = context->needs_input_grad(0) ? dy.matmul(weight) : at::Tensor();
        if (!context->needs_input_grad(1)) return {dx, {}, {}};
        return {dx, weight_gradient(weight, dy, x, deferred_of(context)), {}};
    }
};

/// The value under `key`, which is there, and is no longer.
template <class Map>
auto take(Map& map, const typename Map::key_type& key) {
    return std::move(map.extract(key).mapped());
}

}  // namespace

int first_layer(int layers, int stages, int stage) {
    return int(shard_of(layers, stages, stage).begin);
}

std::map<Instruction, std::vector<Instruction>> settled(const Schedule& schedule, int rank) {
    std::map<Instruction, std::size_t> place, used;  // of each instruction; of what reads a message
    for (const auto& list : schedule.lists)
        for (std::size_t k = 0; k < list.size(); ++k) {
            place[list[k]] = k;
            if (const auto message = schedule.reads(list[k])) used[*message] = k;
        }
    std::map<Instruction, std::vector<Instruction>> shows;
    const auto& mine = schedule.lists[rank];
    for (const Instruction& send : mine) {
        if (!send.sends()) continue;
        const auto shown = std::ranges::find_if(mine, [&](const Instruction& i) {
            return !i.computes() && !i.sends() && schedule.peer(i) == schedule.peer(send) &&
                   place.at(i.other_end()) > used.at(send.other_end());
        });
        if (shown != mine.end()) shows[*shown].push_back(send);
    }
    return shows;
}

at::Tensor deferred_product(const at::Tensor& x, const at::Tensor& weight, const DeferredPtr& deferred) {
    return DeferredProduct::apply(x, weight, deferred);
}

Executor::Executor(const Schedule& schedule, std::map<int, Stage> stages, Loss loss, RanksPtr up,
                   RanksPtr down, Between between, const at::TensorOptions& options, DeferredPtr deferred)
    : schedule_(schedule),
      stages_(std::move(stages)),
      loss_(std::move(loss)),
      up_(std::move(up)),
      down_(std::move(down)),
      between_(std::move(between)),
      options_(options),
      deferred_(std::move(deferred)),
      settled_(settled(schedule_, up_->rank())) {}

at::Tensor Executor::run(const std::vector<Part>& parts, double scale) {
    if (int(parts.size()) != schedule_.micro_batches)
        throw std::invalid_argument(std::to_string(parts.size()) + " micro-batches for a schedule of " +
                                    std::to_string(schedule_.micro_batches));
    parts_ = parts;
    scale_ = scale;
    total_ = at::zeros({}, options_);
    for (const Instruction& i : schedule_.lists[up_->rank()]) {
        if (i.computes())
            compute(i);
        else
            i.sends() ? send(i) : receive(i);
    }
    for (auto& [i, message] : leaving_) way(i).wait(message.pending);
    leaving_.clear();
    Ranks::Pending sum = up_->all_reduce(total_);
    up_->wait(sum);
    return total_;
}

void Executor::compute(const Instruction& i) {
    at::Tensor x = read(i), made;
    deferred_->waiting = i.op == Op::I ? &put_off_[{i.stage, i.micro}] : nullptr;
    if (i.op == Op::W)
        for (const Deferred::Work& work : take(put_off_, {i.stage, i.micro})) work();
    else
        made = i.op == Op::F ? forward(i, std::move(x)) : backward(i, x);
    if (const auto message = schedule_.makes(i)) here_[*message] = made;
}

/// x: of the stage before, undefined in the first. Returns the output, but of the last stage, whose output is the loss.
at::Tensor Executor::forward(const Instruction& i, at::Tensor x) {
    const auto& [tokens_BS, targets_BS] = parts_[i.micro];
    if (x.defined()) inputs_[{i.stage, i.micro}] = x.requires_grad_();
    at::Tensor y = stages_.at(i.stage)(x.defined() ? x : tokens_BS);
    if (i.stage + 1 == schedule_.stages()) {
        y = loss_(y, targets_BS);
        total_ += y.detach();
        y = y * scale_;
    }
    outputs_[{i.stage, i.micro}] = torch::autograd::impl::gradient_edge(y);
    return y.detach();
}

/// dy: the gradient of the stage's output, undefined in the last. Returns the gradient of its input.
at::Tensor Executor::backward(const Instruction& i, const at::Tensor& dy) {
    const at::Tensor from = dy.defined() ? dy : at::ones({}, options_);
    torch::autograd::Engine::get_default_engine().execute({take(outputs_, {i.stage, i.micro})}, {from},
                                                          /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
    return i.stage > 0 ? take(inputs_, {i.stage, i.micro}).grad().contiguous() : at::Tensor();
}

/// What a computation reads from another stage, once it is there.
at::Tensor Executor::read(const Instruction& i) {
    const auto message = schedule_.reads(i);
    if (!message) return {};
    if (!schedule_.travels(*message)) return take(here_, message->other_end());
    Travelling arrived = take(arriving_, *message);
    way(*message).wait(arrived.pending);
    for (const Instruction& sent : settled_[*message]) {
        Travelling over = take(leaving_, sent);
        way(sent).wait(over.pending);
    }
    return arrived.x;
}

void Executor::send(const Instruction& i) {
    const at::Tensor x = take(here_, i);
    leaving_[i] = {x, way(i).send(x, schedule_.peer(i))};
}

void Executor::receive(const Instruction& i) {
    const at::Tensor x = at::empty(between_(parts_[i.micro].first), options_);
    arriving_[i] = {x, way(i).receive(x, schedule_.peer(i))};
}

/// Who carries a message.
Ranks& Executor::way(const Instruction& i) const {
    return i.sends() == (schedule_.peer(i) > up_->rank()) ? *up_ : *down_;
}

Pipeline::Pipeline(const Gpt2Shape& shape, const Schedule& schedule, RanksPtr up, RanksPtr down,
                   const at::TensorOptions& options)
    : up_(std::move(up)), down_(std::move(down)) {
    const int rank = up_->rank(), last = schedule.stages() - 1;
    if (schedule.ranks() != up_->size())
        throw std::invalid_argument("the schedule is for " + std::to_string(schedule.ranks()) +
                                    " rank(s); there are " + std::to_string(up_->size()));
    if (schedule.stages() > shape.layers)
        throw std::invalid_argument(std::to_string(shape.layers) + " layers are too few for " +
                                    std::to_string(schedule.stages()) + " stages");
    const auto deferred = c10::make_intrusive<Deferred>();
    std::map<int, Executor::Stage> run;
    for (int s = 0; s <= last; ++s) {
        if (schedule.owner[s] != rank) continue;
        const int begin = first_layer(shape.layers, last + 1, s),
                  end = first_layer(shape.layers, last + 1, s + 1);
        Gpt2Part stage(shape, begin, end);
        stage->to(options.device(), options.dtype().toScalarType());
        if (s == last && s > 0 && stages_.contains(0)) stage->share(*stages_.at(0));
        stage->use([deferred](const at::Tensor& x, const at::Tensor& weight) {
            return deferred_product(x, weight, deferred);
        });
        run[s] = [stage](const at::Tensor& x) mutable { return stage(x); };
        stages_.emplace(s, stage);
    }
    const int ends[] = {schedule.owner.front(), schedule.owner.back()};
    if (ends[0] != ends[1] && (rank == ends[0] || rank == ends[1])) {
        holds_copy_ = rank == ends[1];
        tied_with_ = ends[holds_copy_ ? 0 : 1];
    }
    const auto loss = [](const at::Tensor& logits_BSV, const at::Tensor& targets_BS) {
        return at::cross_entropy_loss(logits_BSV.flatten(0, -2), targets_BS.flatten(), {},
                                      at::Reduction::Sum);
    };
    const auto between = [D = shape.width](const at::Tensor& tokens_BS) {
        return std::vector<std::int64_t>{tokens_BS.size(0), tokens_BS.size(1), D};
    };
    executor_ =
        std::make_unique<Executor>(schedule, std::move(run), loss, up_, down_, between, options, deferred);
}

std::map<std::string, at::Tensor> Pipeline::parameters() const {
    std::map<std::string, at::Tensor> all;
    for (const auto& [_, stage] : stages_)
        for (const auto& item : stage->named_parameters()) all.emplace(item.key(), item.value());
    return all;
}

at::Tensor Pipeline::run(const std::vector<Part>& parts, double scale) {
    const at::Tensor loss = executor_->run(parts, scale);
    if (tied_with_ >= 0) {  // two ranks: each sends what the other lacks
        const at::NoGradGuard no_grad;
        at::Tensor& gradient = parameters().at("embed_tokens.weight").mutable_grad();
        const at::Tensor mine = gradient.contiguous(), theirs = at::empty_like(mine);
        Ranks::Pending pending = up_->exchange(mine, tied_with_, theirs, tied_with_, 1);
        up_->wait(pending);
        gradient += theirs;
    }
    return loss;
}

std::vector<Message> Pipeline::take_messages() {
    std::vector<Message> all = up_->take_messages();
    for (Message& message : down_->take_messages()) all.push_back(std::move(message));
    return all;
}

}  // namespace fived
