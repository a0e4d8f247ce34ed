// torch_sgmcmc._C: host-side algorithms and constants, without any torch type.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core/counter.h"
#include "core/isa.h"
#include "core/portable_noise.h"
#include "host/as_begun.h"
#include "host/bounce_clock.h"
#include "host/closure_watch.h"
#include "host/dual_averaging.h"
#include "host/ecs_estimate.h"
#include "host/ecs_schedule.h"
#include "host/ecs_sizes.h"
#include "host/fold_in.h"
#include "host/gamma.h"
#include "host/hessian_size.h"
#include "host/index_chain.h"
#include "host/leapfrog_steps.h"
#include "host/metropolis.h"
#include "host/minibatch.h"
#include "host/moments.h"
#include "host/ratio.h"
#include "host/sample_times.h"
#include "host/sampling_weights.h"
#include "host/settings.h"
#include "host/subsample.h"

namespace py = pybind11;
using torch_sgmcmc::BounceClock;
using torch_sgmcmc::Purpose;

namespace {

// The memory of int64 numbers, which Python can take for an array of its own.
py::bytearray Memory(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()),
          numbers.size() * sizeof(int64_t)};
}

// Of each hyperparameter of a sampler: name, kind, default, range, whether it
// may be None, and words.
py::list Settings(const std::string& sampler) {
  constexpr const char* kKinds[] = {"real", "whole", "flag", "word"};
  py::list rows;
  for (const torch_sgmcmc::Setting& row : torch_sgmcmc::SettingsOf(sampler)) {
    py::list words;
    for (const char* word : row.words) {
      if (word != nullptr) words.append(word);
    }
    rows.append(py::make_tuple(row.name,
                               kKinds[static_cast<int>(row.kind)],
                               row.fallback,
                               row.low,
                               row.high,
                               row.low_open,
                               row.optional,
                               py::tuple(words)));
  }
  return rows;
}

torch_sgmcmc::NoiseStream ClockStream(int64_t seed, uint64_t step) {
  return {static_cast<uint64_t>(seed),
          step,
          static_cast<uint32_t>(Purpose::kBounceClock)};
}

}  // namespace

// csrc/python/gauges.cpp
void BindGauges(py::module_& m);
// csrc/python/rows.cpp
void BindRows(py::module_& m);
// csrc/python/shards.cpp
void BindShards(py::module_& m);
// csrc/python/store.cpp
void BindStore(py::module_& m);

PYBIND11_MODULE(_C, m) {
  m.doc() = "Host-side algorithms of torch_sgmcmc, in C++.";

  m.attr("NOISE_BLOCK") = torch_sgmcmc::kNoiseBlock;
  m.def("settings", &Settings, py::arg("sampler"));
  m.def("sampler_keys", &torch_sgmcmc::SamplerKeys);
  py::dict purposes;
  purposes["UPDATE"] = static_cast<int>(Purpose::kUpdate);
  purposes["MOMENTUM"] = static_cast<int>(Purpose::kMomentum);
  purposes["PRECISION"] = static_cast<int>(Purpose::kPrecision);
  purposes["INDEX_CHAIN"] = static_cast<int>(Purpose::kIndexChain);
  purposes["PROBE"] = static_cast<int>(Purpose::kProbe);
  purposes["METROPOLIS"] = static_cast<int>(Purpose::kMetropolis);
  purposes["BOUNCE_CLOCK"] = static_cast<int>(Purpose::kBounceClock);
  purposes["REFRESHMENT"] = static_cast<int>(Purpose::kRefreshment);
  purposes["MINIBATCH"] = static_cast<int>(Purpose::kMinibatch);
  purposes["STRATA"] = static_cast<int>(Purpose::kStrata);
  purposes["SUBSAMPLE"] = static_cast<int>(Purpose::kSubsample);
  purposes["SUBSAMPLE_BLOCK"] = static_cast<int>(Purpose::kSubsampleBlock);
  purposes["POISSON"] = static_cast<int>(Purpose::kPoisson);
  purposes["SEED"] = static_cast<int>(Purpose::kSeed);
  m.attr("Purpose") = py::module_::import("enum").attr("IntEnum")(
      "Purpose", purposes, py::arg("module") = m.attr("__name__"));

  m.def(
      "isa",
      [] { return torch_sgmcmc::IsaName(torch_sgmcmc::ActiveIsa()); },
      "The instruction set of the CPU loops: portable, avx2 or avx512.");

  m.def(
      "philox4x32",
      [](const std::array<uint32_t, 4>& counter,
         const std::array<uint32_t, 2>& key) {
        const uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
        uint32_t out[4];
        torch_sgmcmc::portable::PhiloxBlock(
            c, static_cast<uint64_t>(key[1]) << 32 | key[0], out);
        return std::array<uint32_t, 4>{out[0], out[1], out[2], out[3]};
      },
      py::arg("counter"),
      py::arg("key"),
      "One block of Philox4x32-10 (Salmon et al. 2011).");

  m.def("fold_in",
        &torch_sgmcmc::FoldIn,
        py::arg("seed"),
        py::arg("stream"),
        "The seed of a stream: 64 bits of Philox, a pure function.");

  m.def(
      "gamma",
      [](double shape, int64_t seed, uint64_t step, uint64_t element) {
        return torch_sgmcmc::DrawGamma(
            shape,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kPrecision)},
            element);
      },
      py::arg("shape"),
      py::kw_only(),
      py::arg("seed"),
      py::arg("step"),
      py::arg("element"),
      "One Gamma(shape, 1) variate, a pure function of its arguments.");

  m.def(
      "index_chain_accepts",
      [](double log_ratio, int64_t seed, uint64_t step, uint64_t proposal) {
        return torch_sgmcmc::IndexChainAccepts(
            log_ratio,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kIndexChain)},
            /*chain=*/0,
            proposal);
      },
      py::arg("log_ratio"),
      py::kw_only(),
      py::arg("seed"),
      py::arg("step"),
      py::arg("proposal"),
      "Whether EWSG's index chain takes a proposed minibatch: with probability "
      "min(1, exp(log_ratio)), a pure function of the arguments.");

  m.attr("LOOK") = static_cast<int>(torch_sgmcmc::ClockEvent::kLook);
  m.attr("PROPOSAL") = static_cast<int>(torch_sgmcmc::ClockEvent::kProposal);
  m.attr("REFRESHMENT") =
      static_cast<int>(torch_sgmcmc::ClockEvent::kRefreshment);

  py::class_<BounceClock>(m,
                          "BounceClock",
                          "When SBPS's particle looks, may bounce, and gets a "
                          "new velocity (csrc/host/bounce_clock.h).")
      .def(py::init<>())
      .def_static("load", &BounceClock::Load, py::arg("saved"))
      .def("save", &BounceClock::Save)
      .def("copy", [](const BounceClock& clock) { return clock; })
      .def("__deepcopy__",
           [](const BounceClock& clock, const py::dict&) { return clock; })
      .def(py::pickle([](const BounceClock& clock) { return clock.Save(); },
                      [](const std::vector<double>& saved) {
                        return BounceClock::Load(saved);
                      }))
      .def(
          "__eq__",
          [](const BounceClock& one, const BounceClock& other) {
            return one.Save() == other.Save();
          },
          py::is_operator())
      .def("__repr__",
           [](const BounceClock& clock) {
             return py::str("BounceClock(now={}, observations={})")
                 .format(clock.now(), clock.regression().history().size());
           })
      .def(
          "next",
          [](const BounceClock& clock,
             double confidence,
             double refresh_rate,
             int64_t seed,
             uint64_t step) {
            const torch_sgmcmc::NextEvent next =
                clock.Next(confidence, refresh_rate, ClockStream(seed, step));
            return std::make_tuple(
                static_cast<int>(next.event), next.wait, next.rate);
          },
          py::arg("confidence"),
          py::arg("refresh_rate"),
          py::kw_only(),
          py::arg("seed"),
          py::arg("step"),
          "The next event, the time until then, and the rate of proposals "
          "there: a pure function of the clock and of the arguments.")
      .def_static(
          "accepts",
          [](double rate, double value, int64_t seed, uint64_t step) {
            return BounceClock::Accepts(rate, value, ClockStream(seed, step));
          },
          py::arg("rate"),
          py::arg("value"),
          py::kw_only(),
          py::arg("seed"),
          py::arg("step"),
          "Whether a proposal that observed G = value bounces: with "
          "probability min(1, [value]+ / rate).")
      .def("observe",
           &BounceClock::Observe,
           py::arg("wait"),
           py::arg("value"),
           py::arg("variance"))
      .def("bounce",
           &BounceClock::Bounce,
           py::arg("wait"),
           py::arg("value"),
           py::arg("variance"),
           py::arg("reflected"))
      .def(
          "take",
          [](BounceClock& clock,
             int event,
             double wait,
             double value,
             double variance,
             const std::optional<double>& reflected) {
            clock.Take(static_cast<torch_sgmcmc::ClockEvent>(event),
                       wait,
                       value,
                       variance,
                       reflected);
          },
          py::arg("event"),
          py::arg("wait"),
          py::arg("value"),
          py::arg("variance"),
          py::arg("reflected"),
          "What a step comes to: observe() or bounce(), on a new line if it has "
          "refreshed.")
      .def_property(
          "forgetting", &BounceClock::forgetting, &BounceClock::set_forgetting)
      .def_static("warning",
                  &BounceClock::Warning,
                  py::arg("proposals"),
                  py::arg("violations"),
                  py::arg("confidence"))
      .def("restart", &BounceClock::Restart)
      .def(
          "rate",
          [](const BounceClock& clock,
             double confidence,
             const std::vector<double>& times) {
            if (clock.regression().empty()) {
              throw py::value_error(
                  "Invalid clock: it has no observation to predict from");
            }
            const torch_sgmcmc::PiecewiseRate rate = clock.Rate(confidence);
            std::vector<double> values;
            values.reserve(times.size());
            for (const double time : times) values.push_back(rate.Value(time));
            return values;
          },
          py::arg("confidence"),
          py::arg("times"),
          "The polygon whose positive part is the rate of proposals, at times "
          "since the line began.")
      .def_property_readonly("now", &BounceClock::now)
      .def_property_readonly("observations", [](const BounceClock& clock) {
        std::vector<std::tuple<double, double, double>> all;
        for (const auto& o : clock.regression().history()) {
          all.emplace_back(o.time, o.value, o.variance);
        }
        return all;
      });
  m.def("samples_by",
        &torch_sgmcmc::SamplesBy,
        py::arg("time"),
        py::arg("interval"),
        "How many multiples of the interval are not after the time.");

  py::class_<torch_sgmcmc::Moments>(
      m, "Moments", "What examples of a minibatch say together, for SBPS.")
      .def(py::init<int64_t, int64_t, double, double>(),
           py::arg("bad"),
           py::arg("count"),
           py::arg("mean"),
           py::arg("squares"))
      .def_static(
          "of",
          [](uintptr_t losses,
             uintptr_t derivatives,
             int64_t count,
             bool double_precision) {
            const auto of = [&](auto zero) {
              using T = decltype(zero);
              // NOLINTBEGIN(performance-no-int-to-ptr): what data_ptr() gives.
              return torch_sgmcmc::MomentsOf(
                  reinterpret_cast<const T*>(losses),
                  reinterpret_cast<const T*>(derivatives),
                  count);
              // NOLINTEND(performance-no-int-to-ptr)
            };
            return double_precision ? of(double{}) : of(float{});
          },
          py::arg("losses"),
          py::arg("derivatives"),
          py::arg("count"),
          py::arg("double_precision"),
          "Of two rows of count numbers at these addresses on the host, in "
          "float64 or float32.")
      .def_static("together",
                  &torch_sgmcmc::Together,
                  py::arg("parts"),
                  "Of all examples by those of the parts, in their order.")
      .def_readonly("bad", &torch_sgmcmc::Moments::bad)
      .def_readonly("count", &torch_sgmcmc::Moments::count)
      .def_readonly("mean", &torch_sgmcmc::Moments::mean)
      .def_readonly("squares", &torch_sgmcmc::Moments::squares);
  m.def(
      "rate_of",
      [](const torch_sgmcmc::Moments& moments,
         double num_data,
         double temperature,
         bool replacement,
         double prior) {
        const torch_sgmcmc::RateEstimate rate = torch_sgmcmc::RateOf(
            moments, num_data, temperature, replacement, prior);
        return std::make_tuple(rate.value, rate.variance, rate.finite());
      },
      py::arg("moments"),
      py::arg("num_data"),
      py::arg("temperature"),
      py::arg("replacement"),
      py::arg("prior"),
      "The rate of change of U / T along a line, its variance, and whether "
      "these are finite.");

  m.def(
      "minibatches",
      [](int64_t num_data,
         int64_t batch_size,
         int64_t count,
         bool replacement,
         int64_t seed,
         uint64_t step,
         int64_t num_replicas,
         int64_t rank) {
        return Memory(torch_sgmcmc::DrawMinibatches(
            num_data,
            batch_size,
            count,
            replacement,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kMinibatch)},
            {num_replicas, rank}));
      },
      py::arg("num_data"),
      py::arg("batch_size"),
      py::kw_only(),
      py::arg("count"),
      py::arg("replacement"),
      py::arg("seed"),
      py::arg("step"),
      py::arg("num_replicas"),
      py::arg("rank"),
      "The memory of int64[count, batch_size / num_replicas]: a rank's share of "
      "uniform minibatches of the steps from the given one on, each a pure "
      "function of the arguments.");

  m.def(
      "stratified_minibatches",
      [](const std::vector<int64_t>& ends,
         int64_t batch_size,
         int64_t count,
         int64_t seed,
         uint64_t step,
         int64_t num_replicas,
         int64_t rank) {
        return Memory(torch_sgmcmc::DrawStratifiedMinibatches(
            ends,
            batch_size,
            count,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kStrata)},
            {num_replicas, rank}));
      },
      py::arg("ends"),
      py::arg("batch_size"),
      py::kw_only(),
      py::arg("count"),
      py::arg("seed"),
      py::arg("step"),
      py::arg("num_replicas"),
      py::arg("rank"),
      "The same of stratified minibatches, for data in the order of their "
      "strata, of which the k-th ends before ends[k].");

  m.def(
      "check_share",
      [](int64_t batch_size, int64_t num_replicas, int64_t rank) {
        torch_sgmcmc::CheckShare(batch_size, {num_replicas, rank});
      },
      py::arg("batch_size"),
      py::arg("num_replicas"),
      py::arg("rank"),
      "Raises unless ranks can share minibatches (csrc/host/minibatch.h).");

  m.attr("MOST_CHANGES") = torch_sgmcmc::kMostChanges;
  m.def("changes_running",
        &torch_sgmcmc::ChangesRunning,
        py::arg("before"),
        py::arg("known"),
        py::arg("now"),
        py::arg("temperature"),
        py::arg("num_data"),
        "Of HMC's losses at the same parameters (csrc/host/closure_watch.h).");
  m.def("changed_target", &torch_sgmcmc::ChangedTarget);
  m.def("equal_running",
        &torch_sgmcmc::EqualRunning,
        py::arg("before"),
        py::arg("equal"),
        py::arg("zero"),
        py::kw_only(),
        py::arg("hint"),
        py::arg("off"),
        "Of EWSG's minibatches (csrc/host/closure_watch.h).");

  m.def("ratio", &torch_sgmcmc::Ratio, py::arg("part"), py::arg("whole"));
  m.def("check_hessian_size",
        &torch_sgmcmc::CheckHessianSize,
        py::arg("num_parameters"),
        "Of control variates (csrc/host/hessian_size.h).");
  m.attr("MOST_WARMUP_STEPS") = torch_sgmcmc::kMostWarmupSteps;
  m.def("leapfrog_steps",
        &torch_sgmcmc::LeapfrogSteps,
        py::arg("num_steps"),
        py::arg("length"),
        py::arg("step_size"),
        py::arg("most") = std::nullopt,
        "Of a trajectory (csrc/host/leapfrog_steps.h).");
  m.def("mean_acceptance",
        &torch_sgmcmc::MeanAcceptance,
        py::arg("log_ratios"),
        "The mean of min(1, exp(log_ratio)), 0 for one that is not finite.");

  m.def("mean_of", &torch_sgmcmc::MeanOf, py::arg("numbers"));
  m.def("choose_subsample_size",
        &torch_sgmcmc::ChooseSubsampleSize,
        py::arg("variances"),
        py::arg("size"),
        py::arg("target"),
        py::arg("num_data"),
        "The size of HMC-ECS's perturbed subsamples (csrc/host/ecs_sizes.h).");
  m.def("choose_num_products",
        &torch_sgmcmc::ChooseNumProducts,
        py::arg("variances"),
        py::arg("size"),
        py::arg("target"),
        "The number of HMC-ECS's factors (csrc/host/ecs_sizes.h).");
  m.def("choose_num_products_by_lowest",
        &torch_sgmcmc::ChooseNumProductsByLowest,
        py::arg("variances"),
        py::arg("size"),
        py::arg("means"),
        py::arg("lowest"),
        "The same, to save computing time.");

  using torch_sgmcmc::ECSEstimator;
  py::class_<ECSEstimator>(
      m,
      "ECSEstimator",
      "How HMC-ECS estimates a likelihood from differences, and where the chain "
      "may not go by it (csrc/host/ecs_estimate.h).")
      .def(py::init<double, int64_t, int64_t, double>(),
           py::arg("num_data"),
           py::arg("batch_size") = 1,
           py::arg("num_products") = 0,
           py::arg("lower_bound") = 0.0)
      .def_readonly("num_data", &ECSEstimator::num_data)
      .def_readonly("batch_size", &ECSEstimator::batch_size)
      .def_readonly("num_products", &ECSEstimator::num_products)
      .def_readonly("lower_bound", &ECSEstimator::lower_bound)
      .def(
          "estimate",
          [](const ECSEstimator& estimator,
             uintptr_t differences,
             int64_t count,
             uintptr_t weights,
             uintptr_t importance) {
            // NOLINTBEGIN(performance-no-int-to-ptr): what data_ptr() gives.
            const auto result = torch_sgmcmc::EstimateLikelihood(
                estimator,
                reinterpret_cast<double*>(differences),
                reinterpret_cast<const double*>(importance),
                count,
                reinterpret_cast<double*>(weights));
            // NOLINTEND(performance-no-int-to-ptr)
            return std::make_tuple(result.log,
                                   result.variance,
                                   result.mean,
                                   result.sign,
                                   result.lowest);
          },
          py::arg("differences"),
          py::arg("count"),
          py::arg("weights"),
          py::arg("importance") = 0,
          "Log, variance, mean, sign and lowest, from count float64 numbers at "
          "an address on the host; the derivatives are written to another. With "
          "an address of factors the numbers are multiplied by them in place.")
      .def("is_overturned",
           &torch_sgmcmc::IsOverturned,
           py::arg("mean"),
           "Whether a signed estimate is from a mean below its lower bound.")
      .def("is_out_of_bounds",
           &torch_sgmcmc::IsOutOfBounds,
           py::arg("variance"),
           py::arg("mean"),
           py::kw_only(),
           py::arg("present_variance"),
           py::arg("max_variance"),
           "Whether a proposal with this estimate is rejected as it is.");

  m.def("is_check_due",
        &torch_sgmcmc::IsCheckDue,
        py::arg("trajectories"),
        py::arg("num_data"),
        py::arg("cost"),
        "Whether HMC-ECS looks at all data (csrc/host/ecs_schedule.h).");
  m.def("deepest_fall",
        &torch_sgmcmc::DeepestFall,
        py::arg("dimension"),
        "How far below its value at θ* the log posterior may be.");
  using torch_sgmcmc::ECSSchedule;
  py::class_<ECSSchedule>(m,
                          "ECSSchedule",
                          "Which step of a warm-up of HMC-ECS does what "
                          "(csrc/host/ecs_schedule.h).")
      .def(py::init<int64_t, int64_t>(),
           py::arg("steps"),
           py::arg("anchor_every"))
      .def("check_sizing",
           &ECSSchedule::CheckSizing,
           "Raises if there are no draws by which to choose the sizes.")
      .def(
          "moves_anchor_after", &ECSSchedule::MovesAnchorAfter, py::arg("done"))
      .def("chooses_sizes_after",
           &ECSSchedule::ChoosesSizesAfter,
           py::arg("done"));
  m.def("first_late",
        &torch_sgmcmc::FirstLate,
        py::arg("draws"),
        "Of so many draws of a warm-up, the first that is used.");

  m.def("check_as_begun",
        &torch_sgmcmc::CheckAsBegun,
        py::arg("name"),
        py::arg("now"),
        py::arg("begun"),
        py::arg("way_out") = "",
        "Raises if a warm-up in progress has another value.");

  using torch_sgmcmc::SamplingWeights;
  py::class_<SamplingWeights, std::shared_ptr<SamplingWeights>>(
      m,
      "SamplingWeights",
      "Draws data by weights (csrc/host/sampling_weights.h).")
      .def(py::init([](uintptr_t weights, int64_t size) {
             // NOLINTNEXTLINE(performance-no-int-to-ptr): of data_ptr().
             const auto* numbers = reinterpret_cast<const double*>(weights);
             return std::make_shared<SamplingWeights>(numbers, size);
           }),
           py::arg("weights"),
           py::arg("size"))
      .def_property_readonly("mean", &SamplingWeights::mean);

  using torch_sgmcmc::Subsample;
  py::class_<Subsample>(m,
                        "Subsample",
                        "Which data HMC-ECS estimates from, and what it "
                        "proposes instead (csrc/host/subsample.h).")
      .def(py::init<int64_t,
                    int64_t,
                    int64_t,
                    int64_t,
                    bool,
                    int64_t,
                    std::shared_ptr<const SamplingWeights>>(),
           py::kw_only(),
           py::arg("num_data"),
           py::arg("num_cells"),
           py::arg("num_blocks"),
           py::arg("batch_size"),
           py::arg("poisson"),
           py::arg("seed"),
           py::arg("weights") = nullptr)
      .def("begin",
           &Subsample::Begin,
           py::arg("block"),
           "The first cell of a block.")
      .def(
          "draw",
          [](const Subsample& subsample, uint64_t step) {
            const torch_sgmcmc::Cells cells = subsample.Draw(step);
            return std::make_tuple(cells.counts, Memory(cells.indices));
          },
          py::arg("step"),
          "A whole subsample: the numbers of minibatches in its cells, and the "
          "memory of int64 indices.")
      .def(
          "propose",
          [](const Subsample& subsample, uint64_t step) {
            const torch_sgmcmc::BlockProposal proposal =
                subsample.Propose(step);
            return std::make_tuple(proposal.block,
                                   proposal.cells.counts,
                                   Memory(proposal.cells.indices));
          },
          py::arg("step"),
          "A block and its new cells, as of draw().");

  using torch_sgmcmc::DualAveraging;
  py::class_<DualAveraging>(
      m,
      "DualAveraging",
      "Adapts a step size to a target acceptance probability (Hoffman and "
      "Gelman 2014).")
      .def(py::init<double, double>(), py::arg("step_size"), py::arg("target"))
      .def(py::init<std::vector<double>>(), py::arg("state"))
      .def("update",
           &DualAveraging::Update,
           py::arg("acceptance"),
           "Takes in a trajectory's acceptance probability; returns the next "
           "step size.")
      .def_property_readonly("target", &DualAveraging::target)
      .def_property_readonly("count", &DualAveraging::count)
      .def_property_readonly("step_size", &DualAveraging::step_size)
      .def_property_readonly("averaged", &DualAveraging::averaged)
      .def_property_readonly("state", &DualAveraging::state);

  BindGauges(m);
  BindRows(m);
  BindShards(m);
  BindStore(m);
}
