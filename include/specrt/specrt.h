#pragma once

#include "specrt/constraint.h"
#include "specrt/cpu.h"
#include "specrt/decoder.h"
#include "specrt/draft_tree.h"
#include "specrt/drafter.h"
#include "specrt/error.h"
#include "specrt/memory.h"
#include "specrt/model.h"
#include "specrt/sampling.h"
#include "specrt/static_tree.h"
#include "specrt/types.h"
#include "specrt/version.h"
