// Consecutive blocks, the embeddings before the first, the head after the last, and what is kept of micro-batches.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hybrid_block.hpp"
#include "hybrid_ends.hpp"

namespace fived {

template <class T>
class Stage {
  public:
    /// layers: of the model. embedding: null where neither end is here.
    Stage(Parameters<T>& parameters, const ModelShape& shape, const Mesh& mesh, Workspace<T>& workspace,
          const Range& layers, Embedding<T>* embedding)
        : D_(shape.width), first_(layers.begin == 0), embedding_(embedding) {
        for (std::size_t l = layers.begin; l < layers.end(); ++l)
            blocks_.emplace_back(parameters, "layers." + std::to_string(l), shape, mesh, workspace);
        if (layers.end() == shape.layers) head_.emplace(parameters, shape, mesh, *embedding);
    }

    /// x_ND becomes the stage's output; in the first stage it is written. Returns the last stage's sum of losses.
    double forward(int micro, const MicroBatch& batch, MatrixView<T> x_ND, T scale, const Between& between) {
        Kept& kept = kept_[micro] = take();
        if (first_) embedding_->forward(batch, x_ND);
        for (std::size_t l = 0; l < blocks_.size(); ++l)
            blocks_[l].forward(batch.samples, x_ND, kept->blocks[l], between);
        return head_ ? head_->forward(batch, x_ND, scale, kept->head) : 0;
    }
    /// The gradient of the stage's output becomes that of its input; in the last stage it is written.
    void backward_input(int micro, const MicroBatch& batch, MatrixView<T> dx_ND, const Between& between) {
        Kept& kept = kept_.at(micro);
        if (head_) head_->backward_input(kept->head, dx_ND);
        for (std::size_t l = blocks_.size(); l-- > 0;)
            blocks_[l].backward_input(batch.samples, dx_ND, kept->blocks[l], between);
        if (first_) embedding_->backward(batch, dx_ND);
    }
    /// Adds the gradients of the weights, and forgets the micro-batch.
    void backward_weights(int micro, std::size_t N, const Between& between) {
        Kept kept = std::move(kept_.extract(micro).mapped());
        if (head_) head_->backward_weights(N, D_, kept->head);
        for (std::size_t l = blocks_.size(); l-- > 0;)
            blocks_[l].backward_weights(N, D_, kept->blocks[l], between);
        spare_.push_back(std::move(kept));
    }

  private:
    struct Activations {
        std::vector<typename Block<T>::Kept> blocks;
        typename Head<T>::Kept head;
    };
    using Kept = std::unique_ptr<Activations>;

    /// Memory of an earlier micro-batch, where there is some.
    Kept take() {
        if (spare_.empty())
            return std::make_unique<Activations>(
                Activations{std::vector<typename Block<T>::Kept>(blocks_.size()), {}});
        Kept kept = std::move(spare_.back());
        spare_.pop_back();
        return kept;
    }

    std::size_t D_;
    bool first_;
    Embedding<T>* embedding_;
    std::vector<Block<T>> blocks_;
    std::optional<Head<T>> head_;
    std::map<int, Kept> kept_;  // by micro-batch
    std::vector<Kept> spare_;
};

}  // namespace fived
