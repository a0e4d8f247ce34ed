#include "host/settings.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

using enum SettingKind;

constexpr Setting kStep =
    Of(rows::kLr, {.purpose = "a step size, on SGD's scale"});
constexpr Setting kData = Of(
    rows::kNumData,
    {.purpose = "the number of training examples; 1 if the loss is U itself"});
constexpr Setting kPrior = Of(rows::kPriorPrecision, {.fallback = 0});
constexpr Setting kMean = Of(rows::kPriorMean);
constexpr Setting kWarm = Of(rows::kTemperature, {.fallback = 1});
constexpr Setting kHot = Of(rows::kPositiveTemperature, {.fallback = 1});
constexpr Setting kCarried = Of(rows::kMomentum, {.fallback = 0.9});
constexpr Setting kMemory = Of(rows::kDecay, {.fallback = 0.99});
constexpr Setting kAdapt{.name = "adapt", .kind = kFlag, .fallback = 1};
constexpr Setting kChains = Of(rows::kNumChains, {.optional = true});

constexpr Setting kSGLD[] = {kStep, kData, kPrior, kMean, kWarm, kChains};

constexpr Setting kSGLRW[] = {kStep, kData, kPrior, kMean, kHot, kChains};

constexpr Setting kSGHMC[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kWarm,
    kChains,
    kCarried,
    Of(rows::kNoiseEstimate, {.words = {"online"}}),
    Of(rows::kResampleEvery),
    {.name = "initial_momentum",
     .kind = kWord,
     .words = {"stationary", "zeros"}},
};

constexpr Setting kBAOA[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kWarm,
    kChains,
    kCarried,
    Of(rows::kNoiseEstimate, {.fallback = 0}),
};

constexpr Setting kPSGLD[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kWarm,
    kChains,
    kMemory,
    Of(rows::kEps, {.fallback = 1e-5}),
    kAdapt,
    {.name = "gamma", .kind = kFlag, .fallback = 1},
};

constexpr Setting kSGNHT[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kWarm,
    kChains,
    kCarried,
    Of(rows::kThermostatRate, {.optional = true}),
};

constexpr Setting kEWSG[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kHot,
    kCarried,
    // In the order of csrc/methods/ewsg.h.
    {.name = "surrogate",
     .kind = kWord,
     .words = {"momentum", "zero", "one", "full_momentum"}},
    {.name = "index_chain_length", .kind = kWhole, .fallback = 1},
    {.name = "persistent_index_chain", .kind = kFlag, .fallback = 0},
    kChains,
};

constexpr Setting kHMC[] = {
    {.name = "step_size", .low_open = true, .purpose = "the leapfrog's step"},
    kData,
    kPrior,
    kMean,
    kHot,
    {.name = "num_steps", .kind = kWhole, .low = 1, .optional = true},
    {.name = "trajectory_length", .low_open = true, .optional = true},
    {.name = "metropolis", .kind = kFlag, .fallback = 1},
    Of(rows::kResampleEvery, {.fallback = 1}),
    kChains,
};

constexpr Setting kHMCECS[] = {
    {.name = "num_data",
     .kind = kWhole,
     .low = 1,
     .purpose = "the number of data"},
    kPrior,
    kMean,
    kHot,
    {.name = "estimator", .kind = kWord, .words = {"perturbed", "signed"}},
    {.name = "subsample_size",
     .kind = kWhole,
     .low = 1,
     .purpose = "the number of data in a subsample"},
    {.name = "step_size", .low_open = true},
    {.name = "trajectory_length", .fallback = 1.2, .low_open = true},
    {.name = "num_blocks", .kind = kWhole, .fallback = 100, .low = 1},
    {.name = "taylor_order",
     .kind = kWhole,
     .fallback = 2,
     .low = 0,
     .high = 3},
    {.name = "mass_matrix",
     .kind = kWord,
     .words = {"dense", "diagonal", "identity"}},
    {.name = "num_factors", .kind = kWhole, .fallback = 100, .low = 1},
    {.name = "max_variance", .fallback = 1000, .low_open = true},
    {.name = "chunk_size", .kind = kWhole, .fallback = 8192, .low = 1},
};

constexpr Setting kSBPS[] = {
    kData,
    kPrior,
    kMean,
    kHot,
    {.name = "confidence", .fallback = 5},
    {.name = "forgetting", .fallback = 0},
    {.name = "refresh_rate", .fallback = 0},
    {.name = "preconditioned", .kind = kFlag, .fallback = 0},
    kAdapt,
    {.name = "adapt_always", .kind = kFlag, .fallback = 0},
    kMemory,
    Of(rows::kEps, {.fallback = 1e-4}),
    {.name = "sample_interval", .low_open = true, .optional = true},
    {.name = "replacement", .kind = kFlag, .fallback = 0},
};

struct OfSampler {
  std::string_view sampler;
  std::span<const Setting> settings;
};

constexpr OfSampler kSamplers[] = {{"SGLD", kSGLD},
                                   {"SGLRW", kSGLRW},
                                   {"SGHMC", kSGHMC},
                                   {"BAOA", kBAOA},
                                   {"PSGLD", kPSGLD},
                                   {"SGNHT", kSGNHT},
                                   {"EWSG", kEWSG},
                                   {"HMC", kHMC},
                                   {"HMCECS", kHMCECS},
                                   {"SBPS", kSBPS}};

}  // namespace

std::span<const Setting> SettingsOf(std::string_view sampler) {
  for (const OfSampler& row : kSamplers) {
    if (row.sampler == sampler) return row.settings;
  }
  throw std::out_of_range("no sampler " + std::string(sampler));
}

}  // namespace torch_sgmcmc
