// The mean of a correlated series and how well it is known, in constant memory.
//
// Note [Batch means]
// The series is cut into batches of equal length, whose means are nearly
// independent once they are longer than the series remembers; when there are
// kMost, neighbours are merged and batches become twice as long. With b whole
// batches the standard error is sd(batch means) / sqrt(b), with b - 1 degrees
// of freedom, kMost / 2 at least once the series is longer than kMost. (Flegal
// and Jones 2010; batch lengths here grow with the series, so their number
// stays.)
#pragma once

#include <cstdint>
#include <vector>

namespace torch_sgmcmc {

class BatchMeans {
 public:
  static constexpr int64_t kMost = 32;
  static constexpr int64_t kFewest = 8;  // for an error

  BatchMeans() = default;
  // What State() returned; throws std::invalid_argument if it is none.
  explicit BatchMeans(const std::vector<double>& state);

  void Add(double value);

  int64_t count() const { return count_; }
  double Mean() const;  // NaN before any
  // Its standard error; NaN with fewer than kFewest batches.
  double Error() const;
  // Half the width of the interval that holds the series' expectation with a
  // probability, by Student's distribution.
  double HalfWidth(double probability) const;
  // The largest of HalfWidth for these batches and for neighbours merged, as
  // long as kFewest remain: batches of a slow series still depend on each
  // other.
  double WidestHalfWidth(double probability) const;
  // Of whole batches, in the order of time.
  const std::vector<double>& means() const { return means_; }
  std::vector<double> State() const;

 private:
  int64_t count_ = 0;
  int64_t length_ = 1;    // of a batch
  int64_t in_batch_ = 0;  // entries of the batch that is not whole
  double sum_ = 0;        // of them
  std::vector<double> means_;
};

// The p-quantile of Student's distribution, to 1e-3 for p in [1e-6, 1 - 1e-6]
// and degrees of freedom >= 15, to a few percent for 7 (Cornish-Fisher).
double StudentQuantile(double p, double degrees_of_freedom);

}  // namespace torch_sgmcmc
