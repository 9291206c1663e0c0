#include <absl/strings/str_cat.h>
#include <torch/csrc/autograd/engine.h>

#include "lib/runtime/sharding.h"
#include "lib/runtime/touched.h"

namespace rebind::runtime {
namespace {

// Two threads of a program would interleave their collectives in another order on each rank. The engine's own threads run parts of
// a backward that the program's thread waits for.
void check_thread(const OperatorInfo& info, const Touched& touched) {
  thread_local const char mark = 0;  // its address names the thread, until that ends
  Sharding& sharding = *touched.sharding;
  const void* user = sharding.user_thread.load(std::memory_order_relaxed);
  if (user == &mark || sharding.world_size() == 1 || torch::autograd::get_current_graph_task_id() != -1) return;
  if (user == nullptr && sharding.user_thread.compare_exchange_strong(user, &mark)) return;
  if (user == &mark) return;
  throw_error(sharding.where(absl::StrCat("operator ", info.name), &touched.parameter()),
              "a second thread of the program uses the sharded model; the ranks' collectives could meet in another order",
              "Run the model, its optimizers and reads of its parameters on one thread; give other threads copies (clone())");
}

bool is_live_facade(const Touched& touched) {
  return touched.role() == Role::kFacade && touched.parameter().facade == touched.storage;
}

}  // namespace

void refuse(const OperatorInfo& info, const Touched& touched) {
  check_thread(info, touched);
  Sharding& sharding = *touched.sharding;
  const auto where = [&] { return sharding.where(absl::StrCat("operator ", info.name), &touched.parameter()); };
  const bool alone = sharding.world_size() == 1;
  if (sharding.restored && touched.storage->hidden()) {
    throw_error(where(), "the model was restored since this view, gradient or graph was made",
                "Take it from the plain parameter again");
  }
  if (info.collective) {
    throw_error(where(), "a collective of the program's own on a sharded tensor", "Clone the tensor and use the copy");
  }
  if (info.special == Special::kReplace && touched.written) {
    const bool is_handle = touched.role() != Role::kWindow || touched.parameter().lock_window().is_same(touched.tensor);
    if (is_handle) {
      throw_error(where(), "it would replace the memory or the shape of a sharded tensor (torch::load does that)",
                  "Load inside `auto whole = fsdp->full_parameters(/*write_back=*/true);`, or write the values with copy_()");
    }
  }
  if (info.special == Special::kRenorm && touched.role() == Role::kWindow && !alone) {
    throw_error(where(), "max_norm renormalises other rows on each rank", "Build the embedding without max_norm");
  }
  if (touched.role() == Role::kFacade && !is_live_facade(touched)) {
    throw_error(where(), "this gradient was cleared (zero_grad) and is kept by a handle of the program's own",
                "Clone a gradient to keep it");
  }
  const bool on_shard = touched.role() == Role::kShard || touched.role() == Role::kShardGradient;
  if (on_shard && !alone && (info.reduction || info.special == Special::kAbs) &&
      !(info.special == Special::kNorm && touched.role() == Role::kShardGradient)) {
    throw_error(where(), "an optimizer's list holds this rank's shard; its reduction is not the parameter's",
                "Use model->parameters(), or fsdp->clip_grad_norm(max_norm, norm_type)");
  }
  if (on_shard && touched.written && sharding.whole_open) {
    throw_error(where(), "an optimizer step inside full_parameters() would be lost", "Close the scope before training");
  }
}

}  // namespace rebind::runtime
