#include "specrt/error.h"

#include "specrt/device_error.h"

namespace specrt {

Error::Error(const std::string& message) : std::runtime_error(message) {}

// Out of line, so that each type's vtable and type information live in the library alone and a
// catch in another module finds the same type.
Error::~Error() = default;
InvalidArgument::~InvalidArgument() = default;
LoadError::~LoadError() = default;
UnsupportedError::~UnsupportedError() = default;
CapacityError::~CapacityError() = default;
NumericError::~NumericError() = default;
DeviceError::~DeviceError() = default;
InternalError::~InternalError() = default;

std::string expected_got(const std::string& what, const std::string& expected,
                         const std::string& got) {
  return "[" + what + "] expected " + expected + ", got " + got;
}

}  // namespace specrt
