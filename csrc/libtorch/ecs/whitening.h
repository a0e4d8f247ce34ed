// Trajectories in coordinates x with theta = theta_0 + W x, W W' = M^-1, where
// the mass is 1: torch_sgmcmc/ecs/whitening.py in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace torch_sgmcmc {

// W: a matrix, a diagonal, or undefined for the identity. `kind` is that of the
// mass matrix M: dense, diagonal or identity; the Hessian is that of minus the
// log density. Where it is not positive, curvatures are taken by their absolute
// value, but not as 0.
at::Tensor Whitening(const std::string& kind, const at::Tensor& hessian);

// r += kick W' grad(log pi) and x += drift r; returns origin + W x.
at::Tensor WhitenedLeapfrog(const at::Tensor& x,
                            const at::Tensor& r,
                            const at::Tensor& factor,
                            const at::Tensor& gradient,
                            const at::Tensor& origin,
                            double kick,
                            double drift);

// |r|^2 / 2.
double KineticEnergy(const at::Tensor& r);

}  // namespace torch_sgmcmc
