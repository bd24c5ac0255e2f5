// What a user gave cannot be used. Printed as one line, exit code 2.
#pragma once

#include <stdexcept>

namespace fived {

class UsageError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

}  // namespace fived
