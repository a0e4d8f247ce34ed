#include "host/settings.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {
namespace {

using enum SettingKind;

constexpr Setting kStep =
    Of(args::kLr, {.purpose = "a step size, on SGD's scale"});
constexpr Setting kData = Of(
    args::kNumData,
    {.purpose = "the number of training examples; 1 if the loss is U itself"});
constexpr Setting kPrior = Of(args::kPriorPrecision, {.fallback = 0});
constexpr Setting kMean = Of(args::kPriorMean);
constexpr Setting kTemperature = Of(args::kTemperature, {.fallback = 1});
constexpr Setting kPositiveTemperature =
    Of(args::kPositiveTemperature, {.fallback = 1});
constexpr Setting kMomentum = Of(args::kMomentum, {.fallback = 0.9});
constexpr Setting kDecay = Of(args::kDecay, {.fallback = 0.99});
constexpr Setting kAdapt{.name = "adapt", .kind = kFlag, .fallback = 1};
constexpr Setting kChains = Of(args::kNumChains, {.optional = true});

constexpr Setting kSGLD[] = {kStep, kData,        kPrior,
                             kMean, kTemperature, kChains};

constexpr Setting kSGLRW[] = {
    kStep, kData, kPrior, kMean, kPositiveTemperature, kChains};

constexpr Setting kSGHMC[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kTemperature,
    kChains,
    kMomentum,
    Of(args::kNoiseEstimate, {.words = {"online"}}),
    Of(args::kResampleEvery),
    {.name = "initial_momentum",
     .kind = kWord,
     .words = {"stationary", "zeros"}},
};

constexpr Setting kBAOA[] = {
    kStep,        kData,   kPrior,    kMean,
    kTemperature, kChains, kMomentum, Of(args::kNoiseEstimate, {.fallback = 0}),
};

constexpr Setting kMCLMC[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kPositiveTemperature,
    kChains,
    kMomentum,
    {.name = "tune_steps", .kind = kWhole, .fallback = 0},
    {.name = "energy_variance", .fallback = 5e-4, .low_open = true},
};

constexpr Setting kPSGLD[] = {
    kStep,        kData,
    kPrior,       kMean,
    kTemperature, kChains,
    kDecay,       Of(args::kEps, {.fallback = 1e-5}),
    kAdapt,       {.name = "gamma", .kind = kFlag, .fallback = 1},
};

constexpr Setting kSGNHT[] = {
    kStep,        kData,
    kPrior,       kMean,
    kTemperature, kChains,
    kMomentum,    Of(args::kThermostatRate, {.optional = true}),
};

constexpr Setting kEWSG[] = {
    kStep,
    kData,
    kPrior,
    kMean,
    kPositiveTemperature,
    kMomentum,
    // In the order of csrc/ops/ewsg.h.
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
    kPositiveTemperature,
    {.name = "num_steps", .kind = kWhole, .low = 1, .optional = true},
    {.name = "trajectory_length", .low_open = true, .optional = true},
    {.name = "metropolis", .kind = kFlag, .fallback = 1},
    Of(args::kResampleEvery, {.fallback = 1}),
    kChains,
};

constexpr Setting kHMCECS[] = {
    {.name = "num_data",
     .kind = kWhole,
     .low = 1,
     .purpose = "the number of data"},
    kPrior,
    kMean,
    kPositiveTemperature,
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
    kPositiveTemperature,
    {.name = "num_std", .fallback = 5},
    {.name = "observation_decay", .fallback = 0},
    {.name = "refresh_rate", .fallback = 0},
    {.name = "preconditioned", .kind = kFlag, .fallback = 0},
    kAdapt,
    {.name = "adapt_every_step", .kind = kFlag, .fallback = 0},
    kDecay,
    Of(args::kEps, {.fallback = 1e-4}),
    {.name = "sample_interval", .low_open = true, .optional = true},
    {.name = "replacement", .kind = kFlag, .fallback = 0},
};

struct OfSampler {
  std::string_view sampler;
  std::span<const Setting> settings;
};

constexpr OfSampler kSamplers[] = {
    {"SGLD", kSGLD},   {"SGLRW", kSGLRW},   {"SGHMC", kSGHMC}, {"BAOA", kBAOA},
    {"MCLMC", kMCLMC}, {"PSGLD", kPSGLD},   {"SGNHT", kSGNHT}, {"EWSG", kEWSG},
    {"HMC", kHMC},     {"HMCECS", kHMCECS}, {"SBPS", kSBPS}};

}  // namespace

bool IsSampler(std::string_view name) {
  return std::ranges::find(kSamplers, name, &OfSampler::sampler) !=
         std::end(kSamplers);
}

std::span<const Setting> SettingsOf(std::string_view sampler) {
  std::string known;
  for (const OfSampler& row : kSamplers) {
    if (row.sampler == sampler) return row.settings;
    known += (known.empty() ? "" : ", ") + std::string(row.sampler);
  }
  throw std::out_of_range("no sampler " + std::string(sampler) + " (must be " +
                          known + ")");
}

bool IsSetting(std::string_view name) {
  for (const OfSampler& row : kSamplers) {
    for (const Setting& setting : row.settings) {
      if (setting.name == name) return true;
    }
  }
  return false;
}

}  // namespace torch_sgmcmc
