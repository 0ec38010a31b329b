#pragma once

// A few lines of test harness: the native tests run under sanitizers on machines that have a
// compiler and nothing else.

#include <cmath>
#include <cstdio>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  std::ostringstream out;
  out << file << ":" << line << ": " << text;
  throw Failure(out.str());
}

template <typename A, typename B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

}  // namespace check

#define TEST(name)                                              \
  static void test_##name();                                    \
  static ::check::Register register_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                             \
  do {                                                               \
    if (!(condition)) ::check::fail(__FILE__, __LINE__, #condition); \
  } while (0)

#define CHECK_EQ(a, b) ::check::equal(__FILE__, __LINE__, #a " == " #b, (a), (b))

#define CHECK_NEAR(a, b, tolerance)                                                         \
  do {                                                                                      \
    const double check_a = (a), check_b = (b);                                              \
    if (!(std::fabs(check_a - check_b) <= (tolerance)))                                     \
      ::check::fail(__FILE__, __LINE__,                                                     \
                    std::string(#a " ~ " #b ": ") + std::to_string(check_a) + " against " + \
                        std::to_string(check_b));                                           \
  } while (0)

/// The expression throws `type` and its text contains `part`.
#define CHECK_THROWS(expression, type, part)                                            \
  do {                                                                                  \
    bool check_thrown = false;                                                          \
    try {                                                                               \
      (void)(expression);                                                               \
    } catch (const type& error) {                                                       \
      check_thrown = true;                                                              \
      if (std::string(error.what()).find(part) == std::string::npos)                    \
        ::check::fail(__FILE__, __LINE__, std::string("message: ") + error.what());     \
    }                                                                                   \
    if (!check_thrown) ::check::fail(__FILE__, __LINE__, #expression " did not throw"); \
  } while (0)
