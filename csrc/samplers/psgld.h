// The pSGLD update, shared by CPU and CUDA.
//
//   V     <- a V + (1 - a) grad^2,   G = 1 / (sqrt(V) + eps)   (elementwise)
//   theta <- theta - lr G g + (lr T / N) Gamma + sqrt(2 lr T G / N) xi
//
// with g = grad + (lambda / N) theta and a = decay: Li, Chen, Carlson and Carin
// 2016, algorithm 1. With V frozen it is SGLD with a step size for each
// coordinate, which leaves the target alone; while V adapts, Gamma is needed.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/roles.h"

namespace torch_sgmcmc {

// Note [Gamma of a running mean]
// While V adapts, G follows theta, and a move along -G g without correction
// samples exp(-U) / E[G | theta], where the expectation is over the chain's
// past (integrate the Fokker-Planck equation of (theta, V) over V). What is
// needed is a drift whose mean given theta is T d E[G | theta] / d theta. The
// derivative of G_t by theta_t alone, which the paper's Gamma suggests, is not
// that: the last gradient is only the part 1 - a of V, while the others, taken
// almost at the same theta, move along with it. On N(0, 1) at lr = 0.01 and
// a = 0.9 no Gamma gives the variance 1.79, that Gamma 1.67; nor does it help
// to let G lag behind by a step. The chain seen backwards in time from theta_t
// is, up to O(lr), the same Langevin chain, so theta_{t - k} depends on theta_t
// like the k-th step of a chain on its start: through the product of the steps'
// Jacobians, J = 1 - lr G h with h the curvature of g. Hence
//   Gamma = dG/dV W,   W_t = a J_{t - 1} W_{t - 1} + 2 (1 - a) grad h_t,
// with h_t = d grad / d theta of the same minibatch: diagonals only, as G is
// diagonal. J matters where V remembers longer than the chain does: without it
// a skewed target acquires a drift that does not vanish with 1 - a. J is kept
// in [0, 1 / a], so that W can never grow on its own. The target is then met up
// to O(lr), for any a.

// Note [Where Gamma begins]
// Gamma goes with V^(-3/2), and a first gradient may be as small as it likes.
// On a Gaussian the mean of grad^2 is (T / N) h, so V starts as grad^2 + (T /
// N) |h|: then lr G grad <= lr, and Gamma, with W = dV/dtheta = 2 grad h, moves
// by at most 2 / sqrt(27) lr, whatever grad and h are. (Without that W the
// variance of N(0, 1) grows for a while, to 1.15 at lr = 0.1; with it to
// the 1.05 at which it stays.) Where V would still be 0, for lack of a gradient
// in the first minibatch, it starts as the tensor's mean. If V is there
// already, Gamma having been left out so far, it may rest on one gradient: it
// gets (T / N) |h| as well, but how it came to depend on theta is not known,
// and W starts at 0. Later on Gamma is as good as the number of gradients that
// V rests on: their mean is near 0 only if all are. It is not with a near 0,
// nor where a coordinate's gradients are 0 for longer than V remembers.

struct PSGLDMoveCoefficients {
  PSGLDMoveCoefficients(double lr,
                        double num_data,
                        double prior_precision,
                        double temperature)
      : lr(lr),
        weight_decay(prior_precision / num_data),
        heat(lr * temperature / num_data) {}

  double lr;
  double weight_decay;
  double heat;  // lr T / N
};

struct PSGLDCoefficients : PSGLDMoveCoefficients {
  PSGLDCoefficients(double lr,
                    double num_data,
                    double prior_precision,
                    double temperature,
                    double decay,
                    double eps)
      : PSGLDMoveCoefficients(lr, num_data, prior_precision, temperature),
        decay(decay),
        eps(eps) {}

  double decay;
  double eps;
};

// The move with a given G: the last lines of all three variants.
template <class Real>
class PSGLDMove {
 public:
  explicit PSGLDMove(const PSGLDMoveCoefficients& c)
      : minus_lr_(static_cast<Real>(-c.lr)),
        weight_decay_(static_cast<Real>(c.weight_decay)),
        noise_scale_(static_cast<Real>(std::sqrt(2 * c.heat))) {}

  SG_HOST_DEVICE bool needs_noise() const { return noise_scale_ != 0; }

  // theta after the move, without Gamma.
  SG_INLINE Real Theta(Real theta, Real grad, Real root_of_g, Real xi) const {
    const Real g = Fma(weight_decay_, theta, grad);
    const Real step =
        root_of_g * Fma(minus_lr_ * root_of_g, g, noise_scale_ * xi);
    return theta + step;
  }

  // 1 - lr G h, h the curvature of g.
  SG_INLINE Real Jacobian(Real g_factor, Real curvature) const {
    return Fma(minus_lr_ * g_factor, curvature + weight_decay_, Real(1));
  }

 private:
  Real minus_lr_;
  Real weight_decay_;
  Real noise_scale_;
};

// G is given as its root and stays: two roots an element less, which cost more
// than the memory of a third tensor.
template <class Real>
class PSGLDFrozenUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kParameter, Role::kGradient, Role::kStatistic};

  explicit PSGLDFrozenUpdate(const PSGLDMoveCoefficients& c) : move_(c) {}

  SG_HOST_DEVICE bool needs_noise() const { return move_.needs_noise(); }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[3], Real xi) const {
    x[0] = move_.Theta(x[0], x[1], x[2], xi);
  }

 private:
  PSGLDMove<Real> move_;
};

// V adapts, Gamma is left out.
template <class Real>
class PSGLDAdaptingUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState};

  explicit PSGLDAdaptingUpdate(const PSGLDCoefficients& c)
      : move_(c),
        eps_(static_cast<Real>(c.eps)),
        decay_(static_cast<Real>(c.decay)),
        weight_(static_cast<Real>(1 - c.decay)) {}

  SG_HOST_DEVICE bool needs_noise() const { return move_.needs_noise(); }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[3], Real xi) const {
    x[2] = Fma(weight_ * x[1], x[1], decay_ * x[2]);
    const Real root_of_g = ReciprocalRoot(SquareRoot(x[2]) + eps_);
    x[0] = move_.Theta(x[0], x[1], root_of_g, xi);
  }

 private:
  PSGLDMove<Real> move_;
  Real eps_;
  Real decay_;
  Real weight_;
};

// V adapts, and so does its sensitivity to theta, of which Gamma is made: see
// Note [Gamma of a running mean]. The state holds J W. The last argument is the
// diagonal of the minibatch's Hessian.
template <class Real>
class PSGLDCorrectedUpdate {
 public:
  static constexpr std::array<Role, 5> kRoles = {Role::kParameter,
                                                 Role::kGradient,
                                                 Role::kState,
                                                 Role::kState,
                                                 Role::kGradient};

  explicit PSGLDCorrectedUpdate(const PSGLDCoefficients& c)
      : move_(c),
        eps_(static_cast<Real>(c.eps)),
        decay_(static_cast<Real>(c.decay)),
        weight_(static_cast<Real>(1 - c.decay)),
        minus_half_heat_(static_cast<Real>(-0.5 * c.heat)),
        largest_jacobian_(static_cast<Real>(c.decay > 0 ? 1 / c.decay : 1)) {}

  SG_HOST_DEVICE bool needs_noise() const { return move_.needs_noise(); }
  SG_HOST_DEVICE bool skips(uint64_t /*step*/) const { return false; }

  SG_INLINE void operator()(Real (&x)[5], Real xi) const {
    const Real weighted = weight_ * x[1];
    x[2] = Fma(weighted, x[1], decay_ * x[2]);
    const Real w = Fma(weighted + weighted, x[4], decay_ * x[3]);
    const Real root = SquareRoot(x[2]);
    const Real root_of_g = ReciprocalRoot(root + eps_);
    const Real g = root_of_g * root_of_g;
    // dG/dV = -G^2 / (2 sqrt(V)). V = 0 only if all gradients were 0 or too
    // small to be squared, and then W is 0 or as small.
    const Real slope = w / (root + Real(0x1p-63));
    const Real gamma = minus_half_heat_ * (g * g) * slope;
    x[0] = move_.Theta(x[0], x[1], root_of_g, xi) + gamma;
    Real jacobian = move_.Jacobian(g, x[4]);
    jacobian = jacobian > 0 ? jacobian : Real(0);
    jacobian = jacobian < largest_jacobian_ ? jacobian : largest_jacobian_;
    x[3] = w * jacobian;
  }

 private:
  PSGLDMove<Real> move_;
  Real eps_;
  Real decay_;
  Real weight_;
  Real minus_half_heat_;
  Real largest_jacobian_;
};

}  // namespace torch_sgmcmc
