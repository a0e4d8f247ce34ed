#include "host/batch_means.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace torch_sgmcmc {

namespace {

constexpr double kNoMean = std::numeric_limits<double>::quiet_NaN();

bool IsCount(double x) { return x >= 0 && x <= 0x1p53 && x == std::floor(x); }

// The p-quantile of N(0, 1): Newton's iteration on the upper tail.
double NormalQuantile(double p) {
  const double tail_wanted = p < 0.5 ? p : 1 - p;
  double z = 0;
  for (int i = 0; i < 100; ++i) {
    const double tail = 0.5 * std::erfc(z / std::sqrt(2.0));
    const double density = std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    // The tail is convex where z > 0: from the left the iteration is monotone.
    const double change = (tail - tail_wanted) / density;
    z += change;
    if (change < 1e-14) break;
  }
  return p < 0.5 ? -z : z;
}

}  // namespace

BatchMeans::BatchMeans(const std::vector<double>& state) {
  const auto invalid = [] {
    throw std::invalid_argument("Invalid state of batch means");
  };
  if (state.size() < 4) invalid();
  for (int i = 0; i < 3; ++i) {
    if (!IsCount(state[i])) invalid();
  }
  count_ = static_cast<int64_t>(state[0]);
  length_ = static_cast<int64_t>(state[1]);
  in_batch_ = static_cast<int64_t>(state[2]);
  sum_ = state[3];
  means_.assign(state.begin() + 4, state.end());
  const auto batches = static_cast<int64_t>(means_.size());
  if (length_ < 1 || in_batch_ >= length_ || batches >= kMost ||
      count_ != batches * length_ + in_batch_) {
    invalid();
  }
}

std::vector<double> BatchMeans::State() const {
  std::vector<double> state = {static_cast<double>(count_),
                               static_cast<double>(length_),
                               static_cast<double>(in_batch_),
                               sum_};
  state.insert(state.end(), means_.begin(), means_.end());
  return state;
}

void BatchMeans::Add(double value) {
  ++count_;
  sum_ += value;
  if (++in_batch_ < length_) return;
  means_.push_back(sum_ / static_cast<double>(length_));
  in_batch_ = 0;
  sum_ = 0;
  if (static_cast<int64_t>(means_.size()) < kMost) return;
  for (size_t i = 0; i < kMost / 2; ++i) {
    means_[i] = 0.5 * (means_[2 * i] + means_[2 * i + 1]);
  }
  means_.resize(kMost / 2);
  length_ *= 2;
}

double BatchMeans::Mean() const {
  double sum = 0;
  for (const double mean : means_) sum += mean;
  sum = sum * static_cast<double>(length_) + sum_;
  return count_ == 0 ? kNoMean : sum / static_cast<double>(count_);
}

double BatchMeans::Error() const {
  const auto batches = static_cast<int64_t>(means_.size());
  if (batches < kFewest) return kNoMean;
  const auto b = static_cast<double>(batches);
  double mean = 0;
  for (const double x : means_) mean += x / b;
  double squares = 0;
  for (const double x : means_) squares += (x - mean) * (x - mean);
  return std::sqrt(squares / (b - 1) / b);
}

double BatchMeans::HalfWidth(double probability) const {
  const double error = Error();
  if (!std::isfinite(error)) return error;
  return error * StudentQuantile(0.5 + probability / 2,
                                 static_cast<double>(means_.size()) - 1);
}

double BatchMeans::WidestHalfWidth(double probability) const {
  BatchMeans merged = *this;
  double widest = HalfWidth(probability);
  while (static_cast<int64_t>(merged.means_.size()) >= 2 * kFewest) {
    std::vector<double>& m = merged.means_;
    const size_t pairs = m.size() / 2;
    for (size_t i = 0; i < pairs; ++i) m[i] = 0.5 * (m[2 * i] + m[2 * i + 1]);
    m.resize(pairs);
    widest = std::max(widest, merged.HalfWidth(probability));
  }
  return widest;
}

double StudentQuantile(double p, double degrees_of_freedom) {
  const double z = NormalQuantile(p);
  const double n = degrees_of_freedom;
  const double s = z * z;
  // Abramowitz and Stegun 1964, 26.7.5.
  const double terms[] = {
      z * (s + 1) / 4,
      z * ((5 * s + 16) * s + 3) / 96,
      z * (((3 * s + 19) * s + 17) * s - 15) / 384,
      z * ((((79 * s + 776) * s + 1482) * s - 1920) * s - 945) / 92160};
  double result = z;
  double power = 1;
  for (const double term : terms) {
    power *= n;
    result += term / power;
  }
  return result;
}

}  // namespace torch_sgmcmc
