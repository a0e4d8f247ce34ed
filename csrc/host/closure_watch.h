// Sees closures that do not do as they must, by what they have returned: HMC's,
// whose losses change where the parameters do not, and EWSG's, which does not
// draw minibatches. Neither can be told from a single call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_sgmcmc {

// After so many trajectories running at whose start the loss was another, at
// the same parameters, HMC complains; a loss may change once as it pleases.
constexpr int64_t kMostChanges = 3;

// How many there are with the present one, after so many, by the losses of the
// chains at the end of the trajectory before, and now. Changed is what is
// beyond rounding, and matters in the Metropolis test.
int64_t ChangesRunning(int64_t before,
                       const std::vector<double>& known,
                       const std::vector<double>& now,
                       double temperature,
                       double num_data);

// What HMC then says.
std::string ChangedTarget();

// So many proposals with the gradient of the minibatch before them, from the
// first on, are no chance: if of all pairs of minibatches a share p has equal
// gradients, it is one of probability p^100, below 2^-40 up to p = 0.75.
// (Minibatches of one datum of two have p = 0.5.)
constexpr int64_t kMostEqual = 100;

// How many there are with a present one whose gradient is `equal` to that
// before, after so many; none once one was not. Zero gradients do not count: of
// a loss without data, say. Throws std::runtime_error if there are kMostEqual:
// `hint` is on what to do, and `off` the setting that chooses from nothing.
std::optional<int64_t> EqualRunning(std::optional<int64_t> before,
                                    bool equal,
                                    bool zero,
                                    const std::string& hint,
                                    const std::string& off);

}  // namespace torch_sgmcmc
