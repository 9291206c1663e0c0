#include "lib/comm/error_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

namespace rebind {
namespace {

// The layout that torch.distributed.elastic reads; bytes that are no UTF-8 are replaced.
std::string json_of(const std::string& text) {
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  const nlohmann::json extra{{"py_callstack", text}, {"timestamp", std::to_string(now.count())}};
  const nlohmann::json file{{"message", {{"message", text}, {"extraInfo", extra}}}};
  return file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool write_all(int fd, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

// Gives `from` the name `to` unless there is such a file.
ErrorFile rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return ErrorFile::kWritten;
  // Not every file system knows that flag.
  if (errno != EEXIST && ::link(from.c_str(), to.c_str()) == 0) {
    ::unlink(from.c_str());
    return ErrorFile::kWritten;
  }
  const bool exists = errno == EEXIST;
  ::unlink(from.c_str());
  return exists ? ErrorFile::kKept : ErrorFile::kFailed;
}

ErrorFile write(const std::string& text) {
  const char* name = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (name == nullptr || *name == '\0') return ErrorFile::kNotAsked;
  const std::string file = name;
  if (::access(name, F_OK) == 0) return ErrorFile::kKept;
  std::string temporary = file + ".XXXXXX";
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return ErrorFile::kFailed;
  const bool written = write_all(fd, json_of(text));
  if (::close(fd) != 0 || !written) {
    ::unlink(temporary.c_str());
    return ErrorFile::kFailed;
  }
  return rename_new(temporary, file);
}

}  // namespace

ErrorFile write_error_file(const absl::Status& error) noexcept {
  if (error.ok()) return ErrorFile::kNotAsked;
  try {
    return write(std::string(error.message()));
  } catch (const std::exception&) {  // out of memory
    return ErrorFile::kFailed;
  }
}

ErrorFile write_error_file(const std::exception& error) noexcept {
  try {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    return write(torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
  } catch (const std::exception&) {
    return ErrorFile::kFailed;
  }
}

}  // namespace rebind
