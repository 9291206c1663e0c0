// Keeps a dead peer from ending this process without a word.
//
// Gloo writes to its sockets with plain writev: if the other end is gone the kernel sends SIGPIPE, whose default is to end the
// process, before any error could name the rank. Python ignores that signal from the start, so its programs never see it; a C++
// program must do the same. With the signal ignored the write fails with EPIPE and becomes an Unavailable error.
#pragma once

namespace rebind::comm {

// Ignores SIGPIPE in this process if it has its default effect; a handler of the program's own stays.
void survive_broken_pipes();

}  // namespace rebind::comm
