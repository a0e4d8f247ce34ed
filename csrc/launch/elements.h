// The innermost CPU loop of updates, for drivers (launch/cpu.h) and for sums
// that are taken in the same pass (launch/reduce.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "ops/roles.h"
#include "random/isa.h"
#include "random/macros.h"

#define SG_EACH_ISA "launch/elements.inl"
#include "random/each_isa.inl"
