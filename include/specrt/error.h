#pragma once

#include <stdexcept>
#include <string>

#include "specrt/export.h"

namespace specrt {

/// Base of every exception that the library throws. The text reads
/// "[what] expected ..., got ..." wherever a value was at fault.
class SPECRT_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  Error(const Error&) = default;
  ~Error() override;
};

/// An argument outside what the call accepts. Nothing was changed.
class SPECRT_API InvalidArgument : public Error {
 public:
  using Error::Error;
  ~InvalidArgument() override;
};

/// A file or checkpoint that cannot be used as it is.
class SPECRT_API LoadError : public Error {
 public:
  using Error::Error;
  ~LoadError() override;
};

/// Something well-formed that this build or machine cannot do.
class SPECRT_API UnsupportedError : public Error {
 public:
  using Error::Error;
  ~UnsupportedError() override;
};

/// Memory or room for sequences that is not there; the text gives the numbers.
class SPECRT_API CapacityError : public Error {
 public:
  using Error::Error;
  ~CapacityError() override;
};

/// A NaN or infinity where a finite number has to be.
class SPECRT_API NumericError : public Error {
 public:
  using Error::Error;
  ~NumericError() override;
};

/// A broken promise inside the library: a bug worth reporting.
class SPECRT_API InternalError : public Error {
 public:
  using Error::Error;
  ~InternalError() override;
};

/// "[what] expected <expected>, got <got>"
SPECRT_API std::string expected_got(const std::string& what, const std::string& expected,
                                    const std::string& got);

}  // namespace specrt
