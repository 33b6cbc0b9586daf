#include "tests/kernels/machine/machine.h"

#include <cuda.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace longspan::hopper {

/// Shared memory of the block whose turn it is.
alignas(1024) uint8_t memory[machine::kMostShared];

}  // namespace longspan::hopper

namespace longspan::machine {

namespace {

constexpr int kWarp = 32, kWarpgroup = 128;
constexpr std::size_t kStack = 256 << 10, kPiece = 16;

std::mt19937_64 order;

bool coin(double chance) {
  return std::uniform_real_distribution<>()(order) < chance;
}

void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

/// A thread of the card.
struct Fiber {
  int thread = 0;
  ucontext_t context{};
  std::unique_ptr<std::byte[]> stack;
  bool done = false;
  std::function<bool()> ready;  // empty: at once
  const char* waits_for = "";
  // Products of the warpgroup that it asked for, and how many when it
  // committed.
  int64_t products = 0;
  std::vector<int64_t> commits;
  bool fenced = false;
  std::vector<std::size_t> unfenced;  // pieces of shared memory it wrote
};

struct Warp {
  int arrived = 0;
  int64_t meetings = 0;
  std::array<std::array<Words, kWarp>, 2> words{};  // by turns
};

struct Barrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;  // still to come
  uint32_t phase = 0;
};

struct Meeting {
  int arrived = 0, threads = 0;
  int64_t held = 0;
  std::array<bool, 2> any{};  // by turns
};

struct AskedProduct {
  Product what;
  int threads = 0;
  std::array<float*, kWarpgroup> d{};
  std::array<std::array<uint32_t, 4>, kWarpgroup> a{};
};

struct Warpgroup {
  std::deque<AskedProduct> asked;
  int64_t made = 0;
};

/// A box on its way.
struct Box {
  const CUtensorMap* map;
  uint32_t shared, barrier;
  std::array<int, 4> at;
  int owner = 0;  // of a box that is added
  bool adds = false, committed = false, read = false;
  std::vector<float> sums = {};  // as they were read
};

struct Block {
  int number = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> groups;
  std::map<uint32_t, Barrier> barriers;
  std::array<Meeting, 16> meetings;
  std::vector<Box> boxes;
  std::vector<int> writer;  // of each piece of shared memory, while unfenced
  std::vector<uint8_t> shared;
  std::size_t shared_bytes = 0;
  bool done = false;
};

Block* block = nullptr;  // whose turn it is
Fiber* self = nullptr;   // who runs; nobody outside of turns
ucontext_t scheduler;
const std::function<void()>* work = nullptr;
const char* failure = nullptr;  // what a fiber said last
/// How soon copies and products happen: between at once and when nobody can go
/// on without them. Drawn for every run, each for itself.
double copies_soon = 0.5, products_soon = 0.5;
/// Whether sums that were read reach device memory only when nobody can go on.
bool adds_late = false;

template <class Condition>
void wait_until(const char* what, const Condition& condition) {
  if (condition()) return;
  self->ready = condition;
  self->waits_for = what;
  swapcontext(&self->context, &scheduler);
}

void live() noexcept {
  (*work)();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}

void go_on(Fiber& fiber) {
  self = &fiber;
  fiber.ready = nullptr;
  threadIdx.x = static_cast<unsigned>(fiber.thread);
  blockIdx.x = static_cast<unsigned>(block->number);
  swapcontext(&scheduler, &fiber.context);
  self = nullptr;
  if (failure != nullptr) fail(failure);
}

// ---- Shared memory -------------------------------------------------------

/// As the copy engine and products lay pieces of 16 bytes out.
uint32_t swizzled(uint32_t address) {
  return address ^ ((address >> 7 & 7) << 4);
}

const uint8_t* read_async(uint32_t address, std::size_t bytes) {
  const uint8_t* at = shared_at(address, bytes);
  require(block->writer[(address - kFirstAddress) / kPiece] < 0,
          "an asynchronous instruction reads what was written without a fence");
  return at;
}

float value_of(ElementType type, uint32_t bits) {
  if (type == ElementType::bfloat16) return std::bit_cast<float>(bits << 16);
  const uint32_t size = (bits & 0x7FFF) << 13;
  const float finite = std::bit_cast<float>(size) * 0x1p112f;
  const float x =
      finite < 65536 ? finite : std::bit_cast<float>(size | 0x7F800000);
  return (bits & 0x8000) != 0 ? -x : x;
}

float element_at(ElementType type, uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, read_async(swizzled(address), 2), 2);
  return value_of(type, bits);
}

// ---- Products ------------------------------------------------------------

/// Element (i, k) of an operand, i along its rows or columns.
float operand(ElementType type, uint64_t descriptor, bool across, int i,
              int k) {
  require(descriptor >> 62 == 1, "an operand is not in blocks of 128 bytes");
  const auto field = [&](int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3FFF) << 4;
  };
  const uint32_t start = field(0), far = field(16), near = field(32);
  const auto u = [](int n) { return static_cast<uint32_t>(n); };
  return element_at(
      type, across ? start + u(i / 64) * far + u(k / 8) * near +
                         u(k % 8) * 128 + u(i % 64) * 2
                   : start + u(i / 8) * near + u(i % 8) * 128 + u(k) * 2);
}

/// Row and column of number n of a thread's accumulator.
int row_of(int thread, int n) {
  return 16 * (thread / kWarp) + thread % kWarp / 4 + 8 * (n / 2 % 2);
}
int column_of(int thread, int n) {
  return 8 * (n / 4) + 2 * (thread % 4) + n % 2;
}

void make(const AskedProduct& asked) {
  constexpr int kRows = 64, kDeep = 16;
  const Product& what = asked.what;
  std::array<std::array<float, kDeep>, kRows> a{};
  std::vector<float> b(static_cast<std::size_t>(what.columns * kDeep));
  if (what.in_registers) {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int n = 0; n < 8; ++n) {
        const uint32_t pair = asked.a[thread][n / 2];
        a[row_of(thread, n)][column_of(thread, n)] =
            value_of(what.type, n % 2 == 0 ? pair & 0xFFFF : pair >> 16);
      }
    }
  } else {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kDeep; ++k) {
        a[i][k] = operand(what.type, what.a, what.across_a, i, k);
      }
    }
  }
  for (int j = 0; j < what.columns; ++j) {
    for (int k = 0; k < kDeep; ++k) {
      b[static_cast<std::size_t>(j * kDeep + k)] =
          operand(what.type, what.b, what.across_b, j, k);
    }
  }
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    for (int n = 0; n < what.columns / 2; ++n) {
      const float* x = a[row_of(thread, n)].data();
      const float* y = b.data() + column_of(thread, n) * kDeep;
      float sum = 0;
      for (int k = 0; k < kDeep; ++k) sum += x[k] * y[k];
      float& d = asked.d[thread][n];
      d = what.adds ? d + sum : sum;
    }
  }
}

bool make_next(Warpgroup& group) {
  if (group.asked.empty() || group.asked.front().threads < kWarpgroup) {
    return false;
  }
  make(group.asked.front());
  group.asked.pop_front();
  ++group.made;
  return true;
}

// ---- Boxes ---------------------------------------------------------------

/// Calls visit(element in the tensor or null, address in shared memory) for
/// every element of a box.
template <class Visit>
void each_element(const Box& box, const Visit& visit) {
  const CUtensorMap& map = *box.map;
  const int64_t inner = map.box[0], bytes = map.element_bytes;
  const int64_t tokens = map.box[1];
  for (int64_t i = 0; i < inner * tokens * map.box[2]; ++i) {
    const int64_t at[4] = {box.at[0] + i % inner,
                           box.at[1] + i / inner % tokens,
                           box.at[2] + i / (inner * tokens), box.at[3]};
    int64_t offset = 0;
    bool there = true;
    for (int axis = 0; axis < 4; ++axis) {
      there = there && at[axis] >= 0 && at[axis] < map.sizes[axis];
      offset += at[axis] * map.strides[axis];
    }
    visit(there ? map.data + offset : nullptr,
          swizzled(box.shared + static_cast<uint32_t>(i * bytes)));
  }
}

void complete(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.missing = barrier.arrivals;
  barrier.phase ^= 1;
}

Barrier& barrier_at(uint32_t address) {
  const auto found = block->barriers.find(address);
  require(found != block->barriers.end(), "no barrier was made there");
  return found->second;
}

/// Takes a box one step on; whether it is done.
bool move(Box& box) {
  const std::size_t bytes = box.map->element_bytes;
  if (!box.adds) {
    int64_t total = 0;
    each_element(box, [&](const uint8_t* from, uint32_t to) {
      uint8_t* const at = shared_at(to, bytes);
      if (from == nullptr) {
        std::memset(at, 0, bytes);
      } else {
        std::memcpy(at, from, bytes);
      }
      total += static_cast<int64_t>(bytes);
    });
    Barrier& barrier = barrier_at(box.barrier);
    barrier.bytes -= total;
    complete(barrier);
    return true;
  }
  if (!box.read) {
    each_element(box, [&](const uint8_t*, uint32_t from) {
      float x;
      std::memcpy(&x, read_async(from, sizeof x), sizeof x);
      box.sums.push_back(x);
    });
    box.read = true;
    return false;
  }
  std::size_t n = 0;
  each_element(box, [&](uint8_t* to, uint32_t) {
    const float more = box.sums[n++];
    if (to == nullptr) return;
    float x;
    std::memcpy(&x, to, sizeof x);
    x += more;
    std::memcpy(to, &x, sizeof x);
  });
  return true;
}

bool move_some_box(bool late) {
  if (block->boxes.empty()) return false;
  const auto at = block->boxes.begin() +
                  static_cast<std::ptrdiff_t>(order() % block->boxes.size());
  if (at->read && adds_late && !late) return false;
  if (move(*at)) block->boxes.erase(at);
  return true;
}

// ---- Turns ---------------------------------------------------------------

/// Everybody who can go on does, or not yet; whether anybody did.
bool take_turns(bool all) {
  std::vector<std::size_t> warps(block->warps.size());
  for (std::size_t i = 0; i < warps.size(); ++i) warps[i] = i;
  std::shuffle(warps.begin(), warps.end(), order);
  bool moved = false;
  for (const std::size_t warp : warps) {
    if (!all && coin(0.25)) continue;
    for (int i = 0; i < kWarp; ++i) {
      Fiber& fiber = block->fibers[warp * kWarp + static_cast<std::size_t>(i)];
      if (fiber.done || (fiber.ready && !fiber.ready())) continue;
      go_on(fiber);
      moved = true;
    }
  }
  const auto happens = [&](double soon) {
    return (all && !moved) || coin(soon);
  };
  for (Warpgroup& group : block->groups) {
    if (happens(products_soon) && make_next(group)) moved = true;
  }
  while (happens(copies_soon) && move_some_box(all && !moved)) moved = true;
  return moved;
}

std::string who_waits() {
  std::map<std::string, std::vector<int>> waiting;
  for (const Fiber& fiber : block->fibers) {
    if (!fiber.done) waiting[fiber.waits_for].push_back(fiber.thread);
  }
  std::ostringstream text;
  text << "block " << block->number << " is stuck";
  for (const auto& [what, threads] : waiting) {
    text << "; " << threads.size() << " threads from " << threads.front()
         << " on wait for " << what;
  }
  return text.str();
}

/// Whether anybody went on: who waits for another block may not.
bool run_turns(int turns) {
  bool moved = false;
  for (; turns > 0; --turns) {
    if (!take_turns(false) && !take_turns(true)) return moved;
    moved = true;
    block->done = std::ranges::all_of(block->fibers, &Fiber::done);
    if (!block->done) continue;
    require(block->boxes.empty(), "a block ends before its copies");
    return true;
  }
  return true;
}

/// By itself: what is in registers when a context is taken may be lost.
[[gnu::noinline]] void give_stack(Fiber& fiber) {
  fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStack);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  makecontext(&fiber.context, live, 0);
}

void begin(Block& made, int number, int threads, std::size_t shared_bytes) {
  made.number = number;
  made.shared_bytes = shared_bytes;
  made.shared.assign(kMostShared, 0xFF);  // NaN, whoever reads it
  made.writer.assign(kMostShared / kPiece, -1);
  made.fibers.resize(static_cast<std::size_t>(threads));
  made.warps.resize(made.fibers.size() / kWarp);
  made.groups.resize(made.fibers.size() / kWarpgroup);
  for (Fiber& fiber : made.fibers) {
    fiber.thread = static_cast<int>(&fiber - made.fibers.data());
    give_stack(fiber);
  }
}

Warpgroup& my_group() {
  return block->groups[static_cast<std::size_t>(self->thread / kWarpgroup)];
}

}  // namespace

void fail(const char* what) {
  if (self == nullptr) throw std::logic_error(std::string("machine: ") + what);
  // Nothing is thrown on the stack of a fiber, which nobody unwinds.
  failure = what;
  swapcontext(&self->context, &scheduler);
  std::abort();
}

void set_seed(uint64_t seed) {
  const char* const other = std::getenv("LONGSPAN_SEED");
  order.seed(other == nullptr ? seed : seed + std::stoull(other));
}

void run(int blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body) {
  require(threads % kWarpgroup == 0, "threads are not whole warpgroups");
  require(shared_bytes + kFirstAddress <= kMostShared,
          "a block wants more shared memory than there is");
  for (double* const soon : {&copies_soon, &products_soon}) {
    *soon = std::array{0.02, 0.5, 0.98}[order() % 3];
  }
  adds_late = coin(0.5);
  work = &body;
  failure = nullptr;
  blockDim.x = static_cast<unsigned>(threads);
  gridDim.x = static_cast<unsigned>(blocks);
  std::vector<Block> all(static_cast<std::size_t>(blocks));
  for (Block& made : all) {
    begin(made, static_cast<int>(&made - all.data()), threads, shared_bytes);
  }
  std::vector<const Block*> stuck;  // since anybody went on
  for (;;) {
    std::vector<Block*> left;
    for (Block& made : all) {
      if (!made.done) left.push_back(&made);
    }
    if (left.empty()) return;
    block = left[order() % left.size()];
    std::memcpy(hopper::memory, block->shared.data(), kMostShared);
    const bool moved = run_turns(static_cast<int>(1 + order() % 256));
    std::memcpy(block->shared.data(), hopper::memory, kMostShared);
    if (moved) {
      stuck.clear();
    } else if (std::ranges::find(stuck, block) == stuck.end()) {
      stuck.push_back(block);
      if (stuck.size() == left.size()) fail(who_waits().c_str());
    }
  }
}

int lane() {
  return self->thread % kWarp;
}

uint8_t* shared_at(uint32_t address, std::size_t bytes) {
  require(address >= kFirstAddress &&
              address - kFirstAddress + bytes <= block->shared_bytes,
          "an address lies outside of shared memory");
  return hopper::memory + (address - kFirstAddress);
}

uint32_t address_of(const void* pointer) {
  const auto offset = static_cast<const uint8_t*>(pointer) - hopper::memory;
  require(offset >= 0 && offset < static_cast<std::ptrdiff_t>(kMostShared),
          "a pointer does not point to shared memory");
  return kFirstAddress + static_cast<uint32_t>(offset);
}

const Words* meet_lanes(const Words& mine) {
  Warp& warp = block->warps[static_cast<std::size_t>(self->thread / kWarp)];
  const int64_t meeting = warp.meetings;
  auto& words = warp.words[static_cast<std::size_t>(meeting % 2)];
  words[static_cast<std::size_t>(lane())] = mine;
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.meetings;
  } else {
    wait_until("their warp",
               [&warp, meeting] { return warp.meetings != meeting; });
  }
  return words.data();
}

void barrier_init(uint32_t barrier, int arrivals) {
  require(barrier % 8 == 0, "a barrier is not aligned");
  (void)shared_at(barrier, 8);
  block->barriers[barrier] = {.arrivals = arrivals, .missing = arrivals};
}

void barrier_arrive(uint32_t barrier, uint32_t bytes) {
  Barrier& at = barrier_at(barrier);
  require(at.missing > 0, "more arrive at a barrier than it waits for");
  at.bytes += bytes;
  --at.missing;
  complete(at);
}

void barrier_wait(uint32_t barrier, uint32_t parity) {
  const Barrier& at = barrier_at(barrier);
  wait_until("a barrier in shared memory",
             [&at, parity] { return at.phase != parity; });
}

void meet(int number, int threads, bool waits) {
  require(number >= 0 && number < std::ssize(block->meetings),
          "a barrier by number is not one of 16");
  Meeting& meeting = block->meetings[static_cast<std::size_t>(number)];
  require(meeting.arrived == 0 || meeting.threads == threads,
          "a meeting is of two numbers of threads");
  meeting.threads = threads;
  const int64_t held = meeting.held;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.held;
  } else if (waits) {
    wait_until("a barrier by number",
               [&meeting, held] { return meeting.held != held; });
  }
}

void wait_for_number(const int* at, int least) {
  wait_until("a number in device memory", [at, least] { return *at >= least; });
}

bool meet_any(int number, int threads, bool x) {
  require(number >= 0 && number < std::ssize(block->meetings),
          "a barrier by number is not one of 16");
  Meeting& meeting = block->meetings[static_cast<std::size_t>(number)];
  bool& any = meeting.any[static_cast<std::size_t>(meeting.held % 2)];
  any = x || (any && meeting.arrived > 0);
  meet(number, threads, true);
  return any;
}

void write_shared(uint32_t address, const void* from, std::size_t bytes) {
  require(address % bytes == 0, "a store is not aligned");
  std::memcpy(shared_at(address, bytes), from, bytes);
  const std::size_t piece = (address - kFirstAddress) / kPiece;
  block->writer[piece] = self->thread;
  self->unfenced.push_back(piece);
}

void fence_async() {
  for (const std::size_t piece : self->unfenced) {
    if (block->writer[piece] == self->thread) block->writer[piece] = -1;
  }
  self->unfenced.clear();
}

void fetch_box(uint32_t to, const void* map, uint32_t barrier,
               const int (&at)[4]) {
  require(to % 1024 == 0, "a box is not aligned to 1024");
  block->boxes.push_back({.map = static_cast<const CUtensorMap*>(map),
                          .shared = to,
                          .barrier = barrier,
                          .at = std::to_array(at)});
  if (coin(copies_soon)) move_some_box(false);
}

void add_box(const void* map, uint32_t from, const int (&at)[4]) {
  require(from % 1024 == 0, "a box is not aligned to 1024");
  block->boxes.push_back({.map = static_cast<const CUtensorMap*>(map),
                          .shared = from,
                          .barrier = 0,
                          .at = std::to_array(at),
                          .owner = self->thread,
                          .adds = true});
}

void boxes_commit() {
  for (Box& box : block->boxes) {
    if (box.adds && box.owner == self->thread) box.committed = true;
  }
}

void boxes_wait(bool read) {
  wait_until("copies", [in = block, me = self->thread, read] {
    return std::ranges::none_of(in->boxes, [&](const Box& box) {
      return box.committed && box.owner == me && !(read && box.read);
    });
  });
}

void multiply(const Product& product, float* d, const uint32_t* a) {
  require(self->fenced, "a product after a wait without wgmma_fence");
  Warpgroup& group = my_group();
  const int64_t place = self->products++ - group.made;
  if (place == std::ssize(group.asked)) group.asked.push_back({product});
  AskedProduct& asked = group.asked[static_cast<std::size_t>(place)];
  require(asked.what == product, "threads of a warpgroup ask for two products");
  const auto me = static_cast<std::size_t>(self->thread % kWarpgroup);
  asked.d[me] = d;
  if (a != nullptr) std::copy_n(a, 4, asked.a[me].begin());
  if (++asked.threads == kWarpgroup && coin(products_soon)) {
    while (make_next(group)) {
    }
  }
}

void wgmma_fence() {
  self->fenced = true;
}

void wgmma_commit() {
  self->commits.push_back(self->products);
}

void wgmma_wait(int left) {
  self->fenced = false;
  const std::ptrdiff_t last = std::ssize(self->commits) - 1 - left;
  if (last < 0) return;
  const int64_t wanted = self->commits[static_cast<std::size_t>(last)];
  wait_until("products",
             [&group = my_group(), wanted] { return group.made >= wanted; });
}

}  // namespace longspan::machine

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type,
                                uint32_t rank, void* data,
                                const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  bool fine = rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
              box[0] * static_cast<uint32_t>(bytes) == 128;
  map->data = static_cast<uint8_t*>(data);
  map->element_bytes = bytes;
  for (int axis = 0; axis < 4; ++axis) {
    fine = fine && sizes[axis] > 0 && sizes[axis] <= uint64_t{1} << 32 &&
           box[axis] > 0 && box[axis] <= 256 && steps[axis] == 1;
    const uint64_t stride =
        axis == 0 ? static_cast<uint64_t>(bytes) : strides[axis - 1];
    fine =
        fine && (axis == 0 || (stride % 16 == 0 && stride < uint64_t{1} << 40));
    map->sizes[axis] = static_cast<int64_t>(sizes[axis]);
    map->strides[axis] = static_cast<int64_t>(stride);
    map->box[axis] = box[axis];
  }
  return fine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace longspan {

int device_generation() {
  return 90;
}

}  // namespace longspan
