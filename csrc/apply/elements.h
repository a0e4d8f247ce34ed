// The innermost CPU loop of updates, for drivers (apply/cpu.h) and for sums
// that are taken in the same pass (apply/reduce.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "core/isa.h"
#include "core/macros.h"
#include "core/roles.h"

#define SG_EACH_ISA "apply/elements.inl"
#include "core/each_isa.inl"
