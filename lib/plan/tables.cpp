// FsdpPlan::to_string. For the linear layer of flat_layout.h's example on two ranks:
//
//   rank 0 of 2: 24 elements in 2 parameters, 1 unit
//
//   unit   dtype    parameters  elements  with padding  this rank  gathered
//   model  float32           2        24            32         16     128 B
//
//   parameter  shape   unit   offset  this rank  held by
//   weight     [3, 7]  model       0  [0, 16)    0.0[0]
//   bias       [3]     model      24  -          0.0[1]
//   (held by: optimizer.group[index])
//   ...
#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "lib/base/error.h"
#include "lib/plan/text.h"
#include "rebind/plan.h"

namespace rebind {
namespace {

using plan::bytes_text;
using plan::count_text;

// Rows of a table that is longer than kMostRows: the first and the last of them, and how many were left out.
constexpr size_t kMostRows = 40, kFirstRows = 24, kLastRows = 8;

class Table {
 public:
  // A column whose title begins with '>' is aligned to the right.
  explicit Table(std::vector<std::string> titles) : right_(titles.size(), false) {
    for (size_t c = 0; c < titles.size(); ++c) {
      if (titles[c].front() != '>') continue;
      right_[c] = true;
      titles[c].erase(0, 1);
    }
    rows_.push_back(std::move(titles));
  }

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  void drop_column(size_t column) {
    right_.erase(right_.begin() + static_cast<int64_t>(column));
    for (auto& row : rows_) row.erase(row.begin() + static_cast<int64_t>(column));
  }

  std::string text() const {
    const size_t count = rows_.size() - 1;
    const bool cut = count > kMostRows;
    const auto shown = [&](size_t row) { return !cut || row <= kFirstRows || row > count - kLastRows; };
    std::vector<size_t> widths(right_.size(), 0);
    for (size_t r = 0; r < rows_.size(); ++r) {
      for (size_t c = 0; shown(r) && c < widths.size(); ++c) widths[c] = std::max(widths[c], rows_[r][c].size());
    }
    std::string text;
    for (size_t r = 0; r < rows_.size(); ++r) {
      if (shown(r)) {
        append_row(rows_[r], widths, text);
      } else if (r == kFirstRows + 1) {
        absl::StrAppend(&text, "... ", count_text(static_cast<int64_t>(count - kFirstRows - kLastRows)), " more ...\n");
      }
    }
    return text;
  }

 private:
  void append_row(const std::vector<std::string>& row, const std::vector<size_t>& widths, std::string& text) const {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string blanks(widths[c] - row[c].size(), ' ');
      absl::StrAppend(&line, c == 0 ? "" : "  ", right_[c] ? blanks : "", row[c], right_[c] ? "" : blanks);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }

  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

std::string title_text(const FsdpPlan& plan) {
  int64_t elements = 0;
  for (const ParameterPlan& parameter : plan.parameters) elements += parameter.numel();
  return absl::StrCat("rank ", plan.rank, " of ", plan.world_size, ": ", count_text(elements, "element"), " in ",
                      count_text(static_cast<int64_t>(plan.parameters.size()), "parameter"), ", ",
                      count_text(static_cast<int64_t>(plan.units.size()), "unit"), "\n");
}

std::string kind_text(at::ScalarType dtype, bool requires_grad) {
  return absl::StrCat(plan::dtype_text(dtype), requires_grad ? "" : " frozen");
}

std::string units_text(const FsdpPlan& plan) {
  Table table({"unit", "dtype", ">parameters", ">elements", ">with padding", ">this rank", ">gathered"});
  for (const UnitPlan& unit : plan.units) {
    for (const BufferPlan& buffer : unit.buffers) {
      table.add({unit.name, kind_text(buffer.dtype, buffer.requires_grad),
                 count_text(static_cast<int64_t>(buffer.parameters.size())), count_text(buffer.numel),
                 count_text(buffer.padded_numel), count_text(buffer.shard_numel),
                 bytes_text(buffer.padded_numel * static_cast<int64_t>(c10::elementSize(buffer.dtype)))});
    }
  }
  return table.text();
}

std::string holders_text(const std::vector<Holder>& holders) {
  std::vector<std::string> texts;
  for (const Holder& holder : holders) texts.push_back(absl::StrCat(holder.optimizer, ".", holder.group, "[", holder.index, "]"));
  return texts.empty() ? "-" : absl::StrJoin(texts, " ");
}

// "[4, 3, 3, 3]", of another memory order "[4, 3, 3, 3] by [27, 1, 9, 3]".
std::string order_text(const ParameterPlan& parameter) {
  int64_t expected = 1;
  bool contiguous = true;
  for (size_t d = parameter.sizes.size(); d-- > 0;) {
    contiguous = contiguous && (parameter.sizes[d] == 1 || parameter.strides[d] == expected);
    expected *= parameter.sizes[d];
  }
  const std::string shape = shape_text(parameter.sizes);
  return contiguous || expected == 0 ? shape : absl::StrCat(shape, " by ", shape_text(parameter.strides));
}

std::string parameters_text(const FsdpPlan& plan) {
  const auto kind_of = [](const ParameterPlan& p) { return kind_text(p.dtype, p.requires_grad); };
  bool mixed = false, turned = false;
  Table table({"parameter", "shape", "dtype", "unit", ">offset", "this rank", "held by"});
  for (const ParameterPlan& parameter : plan.parameters) {
    mixed = mixed || kind_of(parameter) != kind_of(plan.parameters.front());
    const std::string order = order_text(parameter);
    turned = turned || order != shape_text(parameter.sizes);
    table.add({absl::StrJoin(parameter.names, " = "), order, kind_of(parameter),
               plan.units[static_cast<size_t>(parameter.unit)].name, count_text(parameter.offset),
               plan::interval_text(parameter.shard.begin, parameter.shard.end), holders_text(parameter.holders)});
  }
  if (!mixed) table.drop_column(2);  // the units say it
  return absl::StrCat(table.text(), "(held by: optimizer.group[index]",
                      turned ? "; by: strides, elements are counted in memory order" : "", ")\n");
}

std::string list_text(const char* title, const std::vector<std::string>& lines) {
  if (lines.empty()) return "";
  Table table({title});
  for (const std::string& line : lines) table.add({"  " + line});
  return "\n" + table.text();
}

std::string memory_text(const MemoryForecast& memory) {
  Table table({"memory of this rank", ">"});
  table.add({"  parameters", bytes_text(memory.parameter_bytes)});
  table.add({"  gradients", bytes_text(memory.gradient_bytes)});
  table.add({"  optimizer state", bytes_text(memory.state_bytes)});
  table.add({"  gathered, at most", bytes_text(memory.peak_gathered_bytes)});
  table.add({"  peak of prepare_fsdp", bytes_text(memory.prepare_peak_bytes)});
  return "\n" + table.text();
}

}  // namespace

std::string FsdpPlan::to_string() const {
  return absl::StrCat(title_text(*this), "\n", units_text(*this), "\n", parameters_text(*this), list_text("groups", groups),
                      memory_text(memory), list_text("notes", notes));
}

}  // namespace rebind
