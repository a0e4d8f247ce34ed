#include "host/flight_heat.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {

std::vector<FlightWindow> FlightHeat::Fly(const FlightPiece& piece,
                                          const std::vector<double>& squares,
                                          const std::vector<double>& products,
                                          const std::vector<int64_t>& numels,
                                          int64_t steps) {
  const size_t tensors = numels.size();
  if (squares.size() != tensors || products.size() != tensors) {
    throw std::invalid_argument("sums of all tensors are needed");
  }
  const bool may_bounce = piece.rate > 0 && piece.value > 0;
  const double weight = may_bounce ? piece.value / piece.rate : 0;
  const double mean_rate = flown_ > 0 ? bounces_ / flown_ : 0;
  flown_ += piece.wait;
  bounces_ += weight;
  if (!is_chosen_) {
    length_ += piece.wait;
    ++steps_;
    is_chosen_ = steps_ >= steps && length_ > 0;
    sums_ = {std::vector<double>(tensors), std::vector<double>(tensors)};
    return {};
  }
  double moving = 0;
  for (size_t i = 0; i < tensors; ++i) {
    if (std::isfinite(squares[i])) moving += static_cast<double>(numels[i]);
  }
  while (piece.wait > kMostWindows * length_) length_ *= 2;
  std::vector<FlightWindow> ended;
  double left = piece.wait;
  // y_k . v_k so long before the piece's end: along a line it grows by |v_k|^2.
  const auto product = [&](size_t i, double before) {
    return products[i] + (piece.until - before) * squares[i];
  };
  const auto pass = [&](double time) {
    for (size_t i = 0; i < tensors; ++i) {
      sums_.heat[i] += time * squares[i];
      sums_.force[i] -= mean_rate * time * product(i, left - time / 2);
    }
    elapsed_ += time;
    left -= time;
  };
  while (elapsed_ + left >= length_) {
    pass(length_ - elapsed_);
    for (size_t i = 0; i < tensors; ++i) {
      sums_.heat[i] *= moving / length_;
      sums_.force[i] *= 2 * moving / length_;
    }
    ended.push_back(sums_);
    sums_ = {std::vector<double>(tensors), std::vector<double>(tensors)};
    elapsed_ = 0;
  }
  pass(left);
  for (size_t i = 0; i < tensors; ++i) sums_.force[i] += weight * product(i, 0);
  return ended;
}

std::vector<double> FlightHeat::State() const {
  if (steps_ == 0) return {};
  std::vector<double> state = {length_,
                               elapsed_,
                               static_cast<double>(steps_),
                               is_chosen_ ? 1.0 : 0.0,
                               flown_,
                               bounces_};
  state.insert(state.end(), sums_.heat.begin(), sums_.heat.end());
  state.insert(state.end(), sums_.force.begin(), sums_.force.end());
  return state;
}

void FlightHeat::SetState(const std::vector<double>& state, size_t tensors) {
  constexpr size_t kNumbers = 6;
  if (state.empty()) {
    *this = {};
    return;
  }
  if (state.size() != kNumbers + 2 * tensors) {
    throw std::invalid_argument(
        "Invalid state: " + std::to_string(state.size()) +
        " numbers of a flight (must be " +
        std::to_string(kNumbers + 2 * tensors) + ")");
  }
  length_ = state[0];
  elapsed_ = state[1];
  steps_ = static_cast<int64_t>(state[2]);
  is_chosen_ = state[3] != 0;
  flown_ = state[4];
  bounces_ = state[5];
  const auto heat = state.begin() + kNumbers;
  const auto force = heat + static_cast<std::ptrdiff_t>(tensors);
  sums_ = {std::vector<double>(heat, force),
           std::vector<double>(force, state.end())};
}

}  // namespace torch_sgmcmc
