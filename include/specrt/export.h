#pragma once

// Everything in the library is hidden unless it carries this mark.
#if defined(_WIN32)
#if defined(SPECRT_BUILDING)
#define SPECRT_API __declspec(dllexport)
#else
#define SPECRT_API __declspec(dllimport)
#endif
#else
#define SPECRT_API __attribute__((visibility("default")))
#endif
