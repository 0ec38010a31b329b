#pragma once

// The one place that holds the version: CMake and pyproject.toml read it from here.
#define SPECRT_VERSION "0.1.0"
