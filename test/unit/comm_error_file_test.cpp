#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "rebind/launch.h"
#include "test/support/catch.h"

namespace rebind {
namespace {

// A folder of its own; TORCHELASTIC_ERROR_FILE names a file in it.
class ErrorFolder {
 public:
  ErrorFolder() : path_(std::filesystem::temp_directory_path() / ("rebind_error_file_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
    ::setenv("TORCHELASTIC_ERROR_FILE", file().c_str(), 1);
  }
  ~ErrorFolder() {
    ::unsetenv("TORCHELASTIC_ERROR_FILE");
    std::filesystem::remove_all(path_);
  }
  std::string file() const { return (path_ / "error.json").string(); }
  std::string content() const {
    std::ifstream stream(file());
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  int files() const {
    return static_cast<int>(std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

TEST_CASE("error file: without the variable nothing is written, and the result says so", "[comm][launch]") {
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  CHECK(write_error_file(absl::InternalError("x")) == ErrorFile::kNotAsked);
  ::setenv("TORCHELASTIC_ERROR_FILE", "", 1);
  CHECK(write_error_file(std::runtime_error("x")) == ErrorFile::kNotAsked);
  const ErrorFolder folder;
  CHECK(write_error_file(absl::OkStatus()) == ErrorFile::kNotAsked);
  CHECK(folder.files() == 0);
}

TEST_CASE("error file: torchrun's layout, the message alone, and no temporary file stays", "[comm][launch]") {
  const ErrorFolder folder;
  CHECK(write_error_file(absl::InvalidArgumentError("rank 1: \"quoted\"\nand \xff broken")) == ErrorFile::kWritten);
  CHECK(folder.files() == 1);
  const nlohmann::json json = nlohmann::json::parse(folder.content());
  CHECK(json["message"]["message"] == "rank 1: \"quoted\"\nand \xEF\xBF\xBD broken");
  CHECK(json["message"]["extraInfo"]["py_callstack"] == json["message"]["message"]);
  const std::string seconds = json["message"]["extraInfo"]["timestamp"];
  CHECK(seconds.size() == 10);
  CHECK(seconds.find_first_not_of("0123456789") == std::string::npos);
}

TEST_CASE("error file: the first error stays", "[comm][launch]") {
  const ErrorFolder folder;
  CHECK(write_error_file(c10::Error("the cause", nullptr)) == ErrorFile::kWritten);
  const std::string first = folder.content();
  CHECK(nlohmann::json::parse(first)["message"]["message"] == "the cause");
  CHECK(write_error_file(std::runtime_error("a consequence")) == ErrorFile::kKept);
  CHECK(folder.content() == first);
  CHECK(folder.files() == 1);
}

TEST_CASE("error file: a file that appears while another is written stays", "[comm][launch]") {
  // Dangling links have no target to look at, but are there.
  const ErrorFolder folder;
  std::filesystem::create_symlink("nowhere", folder.file());
  CHECK(write_error_file(std::runtime_error("late")) == ErrorFile::kKept);
  CHECK(std::filesystem::is_symlink(folder.file()));
  CHECK(folder.files() == 1);
}

TEST_CASE("error file: a folder that is not there is a failure, not an exception", "[comm][launch]") {
  ::setenv("TORCHELASTIC_ERROR_FILE", "/no/such/folder/error.json", 1);
  CHECK(write_error_file(absl::InternalError("x")) == ErrorFile::kFailed);
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
}

}  // namespace
}  // namespace rebind
