#include "matmul_panels.hpp"

#include <stdexcept>
#include <string>

#include "fived/record.hpp"

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
    if (!owner && moves) arriving = comm_.start_receive(landing(0), rank - 1);
    for (std::size_t p = 0; p < panels; ++p) {
        if (!owner && moves) {
            arriving.wait();
            link_free = std::max(link_free, posted) + double(elements(p).size_bytes()) * seconds_a_byte;
            while (clock.seconds() < link_free) leaving[(p + 1) % 2].test();
        }
        if (!last && moves) {
            leaving[p % 2] = comm_.start_send(elements(p), rank + 1);
            sent_ += elements(p).size_bytes();
        }
        leaving[(p + 1) % 2].wait();  // it read the room in which the next panel lands
        if (!owner && moves && p + 1 < panels) {
            arriving = comm_.start_receive(landing(p + 1), rank - 1);
            posted = clock.seconds();
        }
        if (parts == Parts::messages) continue;
        // MPI moves data only inside its calls, so the product stops a few times to let it
        const std::size_t stops = comm_.size() > 1 ? 4 : 1;
        for (std::size_t i = 0; i < stops; ++i) {
            const Range rows = {cut(a.rows, stops, i), cut(a.rows, stops, i + 1) - cut(a.rows, stops, i)};
            gemm<T>(a.row_block(rows.begin, rows.length).column_block(cut(K, panels, p), panel(p).rows),
                    panel(p), c.row_block(rows.begin, rows.length), p > 0 ? T(1) : T(0));
            arriving.test();
            leaving[p % 2].test();
        }
    }
    for (Request& request : leaving) request.wait();
}

template class PanelProduct<float>;
template class PanelProduct<double>;

}  // namespace fived
