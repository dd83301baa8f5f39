// What tests in Python choose of the model, for ctypes.
#include "settings.h"

extern "C" __attribute__((visibility("default"))) void fastattn_model_run_in(int order, uint64_t seed) {
  fastattn::cuda::model::settings.order = static_cast<fastattn::cuda::model::Order>(order);
  fastattn::cuda::model::settings.seed = seed;
}
