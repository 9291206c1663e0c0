// The first host of a Slurm node list, whose tasks begin with rank 0.
//
//   comm::first_host("gnode[10,20]")        // "gnode10"
//   comm::first_host("a[01-03],b7")         // "a01"
//   comm::first_host("rack[2-3]n[05-06]")   // "rack2n05"
//
// It takes the list as text and never asks Slurm, so it works in a container without scontrol.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rebind::comm {

// Nothing if the text is not such a list: empty, a bracket that is not closed or holds no number.
std::optional<std::string> first_host(std::string_view list);

}  // namespace rebind::comm
