#include <ATen/ATen.h>
#include <longspan/batch/shard.h>

int main() {
  const auto owners = longspan::Ownership::contiguous(8, 2);
  const at::Tensor tokens = at::arange(8);
  const at::Tensor mine = longspan::take_share(tokens, owners, 1, 0);
  return at::equal(mine, at::arange(4, 8)) ? 0 : 1;
}
