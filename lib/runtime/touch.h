// The fallback that every operator passes through when one of its arguments is a window, a facade, a shard or a shard's gradient.
//
// Note: Touch. It makes the parameters that the operator reads present, lets the operator run, and carries what it wrote to the
// shards. It needs no hook in a module and no order of use: correctness depends on use alone. Forward, backward (saved tensors
// carry the key), NoGrad and inference all come through here; view operators do not (they touch no element), and an operator
// without such an argument pays nothing.
#pragma once

namespace rebind::runtime {

// Does nothing; that a symbol of the file with the registrations is used keeps a static link from dropping it.
void keep_touch_registered();

}  // namespace rebind::runtime
