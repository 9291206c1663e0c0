// Trains a character GPT on a text, plainly and then sharded. `train_gpt --help` lists the flags.
//
//   torchrun --no-python --standalone --nproc-per-node=2 build/tools/train_gpt --steps=300 --prepare-at=100
//
// Exit codes: 0; 2 for what the user can put right (flags, files, environment, a master or ranks that are not there); 1 for the
// rest.
#include <absl/strings/str_cat.h>
#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "rebind/launch.h"
#include "rebind/process_group.h"
#include "tools/train_gpt/options.h"
#include "tools/train_gpt/text.h"
#include "tools/train_gpt/train.h"

namespace train_gpt {
namespace {

int fail(int code, const std::string& text) {
  std::cerr << "train_gpt: " << text << std::endl;
  rebind::write_error_file(std::runtime_error(text));
  return code;
}

std::string message(const absl::Status& status) { return std::string(status.message()); }

int run(int argc, char** argv) {
  const auto options = parse_options(argc, argv);
  if (!options.ok()) return fail(2, message(options.status()));
  if (options->help) {
    std::cout << usage();
    return 0;
  }
  const auto text = Text::read(options->text_file);
  if (!text.ok()) return fail(2, message(text.status()));
  if (text->size() <= options->gpt.context) {
    return fail(2, absl::StrCat("'", options->text_file, "' has ", text->size(), " characters, a row of --context ",
                                options->gpt.context, " needs at least ", options->gpt.context + 1));
  }
  const auto group = rebind::init_process_group({.timeout = options->timeout});
  if (!group.ok()) return fail(2, message(group.status()));
  if (options->emulate_ranks > 0 && ((*group)->getSize() > 1 || options->prepare_at >= 0)) {
    return fail(2, "--emulate-ranks is for the plain program: one process, and --prepare-at=-1");
  }
  const absl::Status status = train(*options, *text, *group);
  return status.ok() ? 0 : fail(2, message(status));
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
  try {
    return train_gpt::run(argc, argv);
  } catch (const c10::Error& e) {
    return train_gpt::fail(1, e.what_without_backtrace());
  } catch (const std::exception& e) {
    return train_gpt::fail(1, e.what());
  }
}
