// What the shared library shows to the programs that link it.
#pragma once

#define TORCH_SGMCMC_API __attribute__((visibility("default")))
