// SGHMC where rates differ between coordinates:
// torch_sgmcmc/chain/by_coordinate.py in C++.
//
// Algorithm 2 of Chen, Fox and Guestrin (2014) with a mass M and a friction C
// of each coordinate, relative to what lr and momentum say: lr / M and α C / M
// take the places of lr and of α = 1 - momentum, and C is M unless it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "torch_sgmcmc/sghmc.h"

namespace torch_sgmcmc {

// What a parameter was given; undefined where it was not.
struct MassAndFriction {
  at::Tensor mass;
  at::Tensor friction;
};

inline MassAndFriction GivenTo(const SamplerParamState& state) {
  return {state["given_mass"], state["given_friction"]};
}

// Of a parameter's coordinates.
struct RateLimits {
  double most_friction = 1;  // max C / M
  double most_share = 1;     // max 1 / C
};
RateLimits LimitsOf(const MassAndFriction& given);

// Of each parameter M, 1 where it was not given, and C, where any was.
std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> MassesAndFrictions(
    const std::vector<at::Tensor>& params,
    const std::vector<MassAndFriction>& given);

// Whether the step begins with a momentum drawn afresh.
bool IsDrawn(const Work& work);

// Throws std::invalid_argument if a friction exceeds 1, or a coordinate's β̂ its
// friction. There may be no variances.
void CheckRates(const SGHMCOptions& options,
                const std::vector<MassAndFriction>& given,
                const std::vector<RateLimits>& limits,
                const std::vector<at::Tensor>& variances,
                const char* state_of_things);

// A parameter's part of an update.
struct Operands {
  at::Tensor theta;
  at::Tensor mean;  // undefined: the number of the options
  at::Tensor grad;
  at::Tensor momentum;
};

// What a gauge sums over a parameter whose coordinates have masses, weighted so
// that temperatures made with the group's lr and momentum are means of those
// that each coordinate has by its own.
struct CoordinateSums {
  at::Tensor sums;    // of x . g, what is not needed, and v . v
  at::Tensor noise;   // undefined without a gradient before
  double mean_share;  // of 1 / C
};
CoordinateSums SumByCoordinate(const SGHMCOptions& options,
                               const MassAndFriction& given,
                               const Operands& operands,
                               const at::Tensor& center,
                               const at::Tensor& before,
                               bool is_drawn);

}  // namespace torch_sgmcmc
