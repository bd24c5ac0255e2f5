// C = A B where one rank owns B: panels of B pass from rank to rank while the panel before is multiplied.
//
//     C  =  A[:, 0] B[0, :]  +  A[:, 1] B[1, :]  +  ...          n panels of rows of B
//
//     message   [ panel 0 ][ panel 1 ][ panel 2 ]
//     product              [ panel 0 ][ panel 1 ][ panel 2 ]      time ->
//
// Into how many panels? Tc is the time of the product, Tm that of the messages, o what a panel costs beside its share
// of both (a message's start, C read and written once more). The shorter of the two hides behind the longer but for
// its first or last panel:
//
//     T(n)  =  max(Tc, Tm)  +  min(Tc, Tm) / n  +  n o             least at  n* = sqrt(min(Tc, Tm) / o)
//
// Cost: each rank but the last sends |B| once; a rank holds two panels of B beside its rows of A and C.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <span>

#include "dp_matmul_mpi.hpp"

namespace fived {

/// What the closed form takes, in seconds.
struct PanelTimes {
    double compute = 0, message = 0, overhead = 0;

    double shorter() const { return std::min(compute, message); }
    double predicted(double n) const { return std::max(compute, message) + shorter() / n + n * overhead; }
    /// The number of panels for which that is least, from 1 to `most`.
    std::size_t best(std::size_t most) const {
        if (!(overhead > 0)) return most;
        const double n = std::clamp(std::sqrt(shorter() / overhead), 1.0, double(most));
        const std::size_t low = std::size_t(n), high = std::min(most, low + 1);
        return predicted(double(low)) <= predicted(double(high)) ? low : high;
    }
};

/// The rows of A and C are cut over the ranks; rank 0 owns B. `comm` must outlive it.
template <class T>
class PanelProduct {
  public:
    /// What a call does; the messages or the product left out, to time the other.
    enum class Parts { both, messages, product };

    PanelProduct(const Communicator& comm, Shape whole) : comm_(comm), whole_(whole) {}

    /// c = this rank's rows of A B, in `panels` panels of at least a row. b: on rank 0, what is multiplied; not
    /// looked at elsewhere. `seconds_a_byte`: pretend a link on which a byte takes at least so long; 0: as it is.
    /// Collective. Raises std::invalid_argument where shapes do not fit.
    void multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c, std::size_t panels,
                  double seconds_a_byte = 0, Parts parts = Parts::both);

    std::size_t bytes_sent() const { return sent_; }
    std::size_t bytes_by_formula() const {
        return comm_.rank() + 1 < comm_.size() ? whole_.K * whole_.J * sizeof(T) : 0;
    }

  private:
    const Communicator& comm_;
    Shape whole_;
    std::size_t sent_ = 0, room_ = 0;
    std::unique_ptr<T[]> space_;
};

}  // namespace fived
