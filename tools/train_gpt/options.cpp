#include "tools/train_gpt/options.h"

#include <absl/flags/flag.h>
#include <absl/flags/reflection.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/strip.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "tools/train_gpt/text.h"

// Abseil's own parser exits with code 1 at an error; parse_options uses its registry of flags only.
ABSL_FLAG(std::string, text, "", "text to learn, plain or .gz (default: the jargon file if installed, else a licence text)");
ABSL_FLAG(int64_t, layers, 4, "transformer blocks");
ABSL_FLAG(int64_t, dim, 256, "width of the model, a multiple of 64");
ABSL_FLAG(int64_t, context, 128, "characters in a row");
ABSL_FLAG(int64_t, batch, 8, "rows of each rank in each step");
ABSL_FLAG(int64_t, steps, 200, "training steps");
ABSL_FLAG(int64_t, prepare_at, 0, "step before which rebind::prepare_fsdp is called; -1: never, the plain program");
ABSL_FLAG(int, emulate_ranks, 0, "the plain program on the rows that this many ranks would draw (one process only)");
ABSL_FLAG(
    bool, by_rank, false,
    "while unsharded, one backward for each rank's rows and the mean of the gradients, instead of one backward over all rows: "
    "equals the sharded program bit for bit");
ABSL_FLAG(uint64_t, seed, 0, "of the initial weights and of the rows");
ABSL_FLAG(double, lr, 1e-3, "learning rate of AdamW");
ABSL_FLAG(double, weight_decay, 0.1, "of the matrices; biases and norms have none");
ABSL_FLAG(int64_t, lr_step, 100, "StepLR: steps after which the learning rate is multiplied by --lr-decay");
ABSL_FLAG(double, lr_decay, 0.5, "StepLR: the factor");
ABSL_FLAG(std::string, losses, "", "file for the losses, one a line and step, written by rank 0");
ABSL_FLAG(bool, plan, false, "print the plan after prepare_fsdp");
ABSL_FLAG(int64_t, sample, 0, "characters to write with the trained model");
ABSL_FLAG(int64_t, log_every, 10, "steps between two progress lines");
ABSL_FLAG(double, timeout, 600, "seconds that a rank waits for the others");
ABSL_FLAG(bool, help, false, "print this and end");

namespace train_gpt {
namespace {

std::string dashed(const std::string& name) { return absl::StrCat("--", absl::StrReplaceAll(name, {{"_", "-"}})); }

absl::Status bad(const std::string& text) { return absl::InvalidArgumentError(text); }

// Flags of this file. Others (Abseil's own) are not for the user.
std::map<std::string, absl::CommandLineFlag*> own_flags() {
  std::map<std::string, absl::CommandLineFlag*> result;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::StrContains(flag->Filename(), "train_gpt/options.cpp")) result.emplace(std::string(name), flag);
  }
  return result;
}

// --name=value, --name value, --name and --noname for bool; '-' and '_' in names are the same.
absl::Status parse(int argc, char** argv) {
  const auto flags = own_flags();
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!absl::StartsWith(argument, "--")) return bad(absl::StrCat("'", argument, "' is not a flag; see --help"));
    const size_t equals = argument.find('=');
    std::string name = absl::StrReplaceAll(argument.substr(2, equals == std::string::npos ? equals : equals - 2), {{"-", "_"}});
    std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    auto flag = flags.find(name);
    if (flag == flags.end() && equals == std::string::npos && absl::StartsWith(name, "no")) {
      flag = flags.find(name.substr(2));
      if (flag != flags.end() && !flag->second->IsOfType<bool>()) flag = flags.end();
      value = "false";
    } else if (flag != flags.end() && equals == std::string::npos) {
      if (flag->second->IsOfType<bool>()) {
        value = "true";
      } else if (++i < argc) {
        value = argv[i];
      } else {
        return bad(absl::StrCat(dashed(name), " needs a value"));
      }
    }
    if (flag == flags.end()) return bad(absl::StrCat("there is no flag ", argument.substr(0, equals), "; see --help"));
    std::string problem;
    if (!flag->second->ParseFrom(value, &problem)) {
      return bad(absl::StrCat(dashed(flag->first), " cannot be '", value, "'; its default is ", flag->second->DefaultValue()));
    }
  }
  return absl::OkStatus();
}

absl::Status in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (low <= value && value <= high) return absl::OkStatus();
  return bad(absl::StrCat(dashed(name), " is ", value, ", expected ", low, " to ", high));
}

absl::Status check(const Options& options) {
  constexpr int64_t kMany = 1'000'000'000;
  const GptOptions& gpt = options.gpt;
  for (const absl::Status& status :
       {in_range("layers", gpt.layers, 1, 10'000), in_range("dim", gpt.dim, kHeadDim, 1 << 20),
        in_range("context", gpt.context, 1, 1 << 20), in_range("batch", options.batch, 1, 1 << 20),
        in_range("steps", options.steps, 1, kMany), in_range("prepare_at", options.prepare_at, -1, options.steps),
        in_range("emulate_ranks", options.emulate_ranks, 0, 1 << 16), in_range("lr_step", options.lr_step, 1, kMany),
        in_range("sample", options.sample, 0, 1 << 20), in_range("log_every", options.log_every, 1, kMany)}) {
    if (!status.ok()) return status;
  }
  if (gpt.dim % kHeadDim != 0) return bad(absl::StrCat("--dim is ", gpt.dim, ", expected a multiple of ", kHeadDim));
  if (!(options.lr > 0) || !std::isfinite(options.lr))
    return bad(absl::StrCat("--lr is ", options.lr, ", expected a positive number"));
  if (!(options.weight_decay >= 0)) return bad(absl::StrCat("--weight-decay is ", options.weight_decay, ", expected 0 or more"));
  if (!(options.lr_decay > 0)) return bad(absl::StrCat("--lr-decay is ", options.lr_decay, ", expected a positive number"));
  if (options.timeout <= std::chrono::milliseconds(0)) return bad("--timeout must be at least 0.001 seconds");

  // Weights, gradients and two moments in fp32, and the logits and their gradient.
  const int64_t parameters = parameter_count(gpt);
  const double bytes = 16.0 * static_cast<double>(parameters) + 4.0 * static_cast<double>(options.batch * gpt.context) *
                                                                    static_cast<double>(gpt.dim) * static_cast<double>(gpt.layers);
  const double memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (bytes > memory) {
    return bad(absl::StrCat("a model of ", parameters, " parameters with ", options.batch, " rows of ", gpt.context,
                            " needs about ", static_cast<int64_t>(bytes / (1 << 20)), " MiB before it is sharded, this host has ",
                            static_cast<int64_t>(memory / (1 << 20)),
                            " MiB; choose smaller --layers, --dim, --batch or --context"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Options> parse_options(int argc, char** argv) {
  if (absl::Status status = parse(argc, argv); !status.ok()) return status;
  Options options;
  options.text_file = absl::GetFlag(FLAGS_text);
  options.losses_file = absl::GetFlag(FLAGS_losses);
  options.gpt = {.layers = absl::GetFlag(FLAGS_layers), .dim = absl::GetFlag(FLAGS_dim), .context = absl::GetFlag(FLAGS_context)};
  options.batch = absl::GetFlag(FLAGS_batch);
  options.steps = absl::GetFlag(FLAGS_steps);
  options.prepare_at = absl::GetFlag(FLAGS_prepare_at);
  options.log_every = absl::GetFlag(FLAGS_log_every);
  options.sample = absl::GetFlag(FLAGS_sample);
  options.emulate_ranks = absl::GetFlag(FLAGS_emulate_ranks);
  options.by_rank = absl::GetFlag(FLAGS_by_rank);
  options.print_plan = absl::GetFlag(FLAGS_plan);
  options.help = absl::GetFlag(FLAGS_help);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.lr = absl::GetFlag(FLAGS_lr);
  options.weight_decay = absl::GetFlag(FLAGS_weight_decay);
  options.lr_step = absl::GetFlag(FLAGS_lr_step);
  options.lr_decay = absl::GetFlag(FLAGS_lr_decay);
  options.timeout = std::chrono::milliseconds(std::llround(std::clamp(1000.0 * absl::GetFlag(FLAGS_timeout), 0.0, 1e12)));
  if (absl::Status status = check(options); !status.ok()) return status;
  if (options.text_file.empty()) options.text_file = Text::default_file();
  if (options.text_file.empty()) return bad("no text is installed; name one with --text, or install the package jargon-text");
  return options;
}

std::string usage() {
  std::string text =
      "train_gpt: trains a character GPT on a text, plainly, and from step --prepare-at on sharded over all ranks.\n"
      "  torchrun --no-python --standalone --nproc-per-node=2 train_gpt --steps=300 --prepare-at=100\n\n";
  for (const auto& [name, flag] : own_flags()) {
    absl::StrAppend(&text, "  ", dashed(name), " (default ", flag->DefaultValue().empty() ? "none" : flag->DefaultValue(),
                    ")\n      ", flag->Help(), "\n");
  }
  return text;
}

}  // namespace train_gpt
