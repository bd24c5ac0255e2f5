#include "matmul_panels.hpp"

#include <stdexcept>
#include <string>

#include "fived/lesson/record.hpp"

namespace fived {

template <class T>
void PanelProduct<T>::multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c,
                               std::size_t panels, double seconds_a_byte, Parts parts) {
    const int rank = comm_.rank();
    const auto [M, K, J] = whole_;
    const bool owner = rank == 0, last = rank + 1 == comm_.size();
    if (panels < 1 || panels > K)
        throw std::invalid_argument("B has " + std::to_string(K) + " rows; they make 1 to " +
                                    std::to_string(K) + " panels, not " + std::to_string(panels));
    if (a.columns != K || (owner && (b.rows != K || b.columns != J || b.stride != J)))
        throw std::invalid_argument("A is [" + std::to_string(a.rows) + ", " + std::to_string(a.columns) +
                                    "] and B on rank 0 [" + std::to_string(b.rows) + ", " +
                                    std::to_string(b.columns) + "] of rows without gaps; needed are [*, " +
                                    std::to_string(K) + "] and [" + std::to_string(K) + ", " +
                                    std::to_string(J) + "]");
    const std::size_t longest = (K + panels - 1) / panels * J;
    if (!owner && room_ < longest) {
        space_ = std::make_unique<T[]>(2 * longest);
        room_ = longest;
    }
    const auto panel = [&](std::size_t p) {
        const std::size_t begin = cut(K, panels, p), rows = cut(K, panels, p + 1) - begin;
        return owner ? b.row_block(begin, rows) : MatrixView<const T>(space_.get() + p % 2 * room_, rows, J);
    };
    const auto elements = [&](std::size_t p) { return std::span(panel(p).data, panel(p).rows * J); };
    const auto landing = [&](std::size_t p) {
        return std::span(space_.get() + p % 2 * room_, panel(p).rows * J);
    };

    const bool moves = parts != Parts::product;
    Request arriving, leaving[2];
    const Timer clock;
    double link_free = 0,
           posted = 0;  // seconds: the pretended link is free; room for the next panel was offered
    sent_ = 0;
    const auto pass_on = [&](std::size_t p) {
        if (last || !moves || p >= panels) return;
        leaving[p % 2] = comm_.start_send(elements(p), rank + 1);
        sent_ += elements(p).size_bytes();
    };
    const auto make_room = [&](std::size_t p) {
        if (owner || !moves || p >= panels) return;
        leaving[p % 2].wait();  // it reads the room in which panel p lands
        arriving = comm_.start_receive(landing(p), rank - 1);
        posted = clock.seconds();
    };
    make_room(0);
    if (owner) pass_on(0), leaving[0].wait();  // nobody can begin without it
    for (std::size_t p = 0; p < panels; ++p) {
        if (!owner && moves) {
            arriving.wait();
            link_free = std::max(link_free, posted) + double(elements(p).size_bytes()) * seconds_a_byte;
            while (clock.seconds() < link_free) leaving[(p + 1) % 2].test();
        }
        pass_on(owner ? p + 1 : p);
        make_room(p + 1);
        // MPI moves data only inside its calls, so the product stops a few times to let it
        const std::size_t stops = comm_.size() > 1 ? 4 : 1;
        const MatrixView<const T> a_p = a.column_block(cut(K, panels, p), panel(p).rows), b_p = panel(p);
        for (std::size_t i = 0; i < stops && parts != Parts::messages; ++i) {
            const std::size_t begin = cut(J, stops, i), columns = cut(J, stops, i + 1) - begin;
            gemm<T>(a_p, b_p.column_block(begin, columns), c.column_block(begin, columns),
                    p > 0 ? T(1) : T(0));
            arriving.test();
            for (Request& request : leaving) request.test();
        }
        if (owner) leaving[(p + 1) % 2].wait();  // the next panel, which the others now need
    }
    for (Request& request : leaving) request.wait();
}

template class PanelProduct<float>;
template class PanelProduct<double>;

}  // namespace fived
