// Puts a device that says it is CUDA into torch's CPU build, whose places for one are empty.
//
// A device address is a page that nobody may read: host code that takes it for memory faults, as it would on a GPU. The
// values are stored beside it, and `open_view` gives them to the closures that stand for kernels.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace {

const c10::Device THE_DEVICE(c10::kCUDA, 0);
constexpr size_t PAGE = 4096;
constexpr size_t TOTAL_BYTES = size_t(80) << 30;  // as in cuda_names.py
constexpr int SPOILT = 0xFF;  // NaN in every floating dtype

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Block {
  void* values;
  size_t num_bytes;
  size_t reserved_bytes;
  int64_t stream;  // that it was allocated on, which the next owner of the memory would use
};

class Arena {
 public:
  void* reserve(size_t num_bytes, int64_t stream) {
    size_t reserved = round_up(num_bytes, PAGE) + PAGE;
    TORCH_CHECK_WITH(OutOfMemoryError, num_bytes <= TOTAL_BYTES && live_bytes_ <= TOTAL_BYTES - num_bytes,
                     "CUDA out of memory. Tried to allocate ", num_bytes, " bytes of a virtual device.");
    void* address = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "the virtual device has no address space left");
    void* values = aligned_alloc(64, round_up(num_bytes, 64));
    memset(values, SPOILT, num_bytes);
    std::lock_guard<std::mutex> guard(mutex_);
    blocks_[reinterpret_cast<uintptr_t>(address)] = {values, num_bytes, reserved, stream};
    live_bytes_ += num_bytes;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    ++num_allocations_;
    return address;
  }
  void note_free(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto entry = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
    if (entry == blocks_.end()) return;
    live_bytes_ -= entry->second.num_bytes;
    freed_.emplace_back(entry->first, entry->second.stream);
  }
  std::vector<std::pair<uintptr_t, int64_t>> take_freed() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::pair<uintptr_t, int64_t>> taken;
    taken.swap(freed_);
    return taken;
  }
  void spoil(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto entry = blocks_.find(address);
    if (entry != blocks_.end()) memset(entry->second.values, SPOILT, entry->second.num_bytes);
  }
  void drop(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto entry = blocks_.find(address);
    if (entry == blocks_.end()) return;
    free(entry->second.values);
    munmap(reinterpret_cast<void*>(address), entry->second.reserved_bytes);
    blocks_.erase(entry);
  }
  char* values(uintptr_t address, int64_t end_byte) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto entry = blocks_.find(address);
    TORCH_CHECK(entry != blocks_.end(), "virtual device: work uses memory that was freed");
    TORCH_CHECK(end_byte <= static_cast<int64_t>(entry->second.num_bytes), "virtual device: work leaves its memory");
    return static_cast<char*>(entry->second.values);
  }
  std::tuple<size_t, size_t, int64_t> stats() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {live_bytes_, peak_bytes_, num_allocations_};
  }
  void reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_bytes_ = live_bytes_;
  }
  void pin(uintptr_t address, size_t num_bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    pinned_[address] = num_bytes;
  }
  void unpin(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    pinned_.erase(address);
  }
  bool is_pinned(uintptr_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = pinned_.upper_bound(address);
    if (next == pinned_.begin()) return false;
    --next;
    return address < next->first + next->second;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, Block> blocks_;
  std::map<uintptr_t, size_t> pinned_;
  std::vector<std::pair<uintptr_t, int64_t>> freed_;
  size_t live_bytes_ = 0, peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
};

Arena& arena() {
  static Arena* the_arena = new Arena;  // outlives every tensor
  return *the_arena;
}

thread_local int64_t current_stream = 0;
thread_local bool has_chosen_device = false;
std::atomic<bool> is_closed{false};
PyObject* scheduler = nullptr;  // a Python object; see streams.py

py::object ask(const char* method, py::args arguments) {
  return py::reinterpret_borrow<py::object>(scheduler).attr(method)(*arguments);
}
py::object borrowed(void* event) { return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(event)); }

struct DeviceAllocator final : c10::Allocator {
  static void release(void* pointer) { arena().note_free(pointer); }
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, THE_DEVICE};
    void* address = arena().reserve(num_bytes, current_stream);
    return {address, address, &release, THE_DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "copies are kernels"); }
} device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  static void release(void* pointer) {
    arena().unpin(reinterpret_cast<uintptr_t>(pointer));
    free(pointer);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    void* memory = aligned_alloc(PAGE, round_up(num_bytes, PAGE));
    memset(memory, SPOILT, num_bytes);
    arena().pin(reinterpret_cast<uintptr_t>(memory), num_bytes);
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override { memcpy(to, from, num_bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

// What autograd asks of a device: its streams and events.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream_of(int64_t number) { return c10::Stream(c10::Stream::UNSAFE, THE_DEVICE, number); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return THE_DEVICE; }
  c10::Device getDevice() const override { return THE_DEVICE; }
  void setDevice(c10::Device) const override { has_chosen_device = true; }
  void uncheckedSetDevice(c10::Device) const noexcept override { has_chosen_device = true; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    py::gil_scoped_acquire gil;
    return stream_of(py::cast<int64_t>(ask("new_stream", py::make_tuple())));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr || is_closed) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(event));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    py::gil_scoped_acquire gil;
    if (*event != nullptr) Py_DECREF(static_cast<PyObject*>(*event));
    *event = ask("record", py::make_tuple(stream.id())).release().ptr();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    py::gil_scoped_acquire gil;
    ask("wait", py::make_tuple(borrowed(event), stream.id()));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    py::gil_scoped_acquire gil;
    return py::cast<bool>(ask("query", py::make_tuple(borrowed(event))));
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    py::gil_scoped_acquire gil;
    ask("synchronize_event", py::make_tuple(borrowed(event)));
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& stream) const override {
    py::gil_scoped_acquire gil;
    ask("synchronize_stream", py::make_tuple(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    py::gil_scoped_acquire gil;
    ask("synchronize_device", py::make_tuple());
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// What torch asks of CUDA as a whole. torch has made its empty hooks by now; `take_hooks` lets ours answer for them.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // For a while: what had no device before has none afterwards.
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    bool had_one = std::exchange(has_chosen_device, true);
    return had_one ? 0 : -1;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex former) const override {
    has_chosen_device = former >= 0;
    return 0;
  }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* pointer) const override {
    return arena().is_pinned(reinterpret_cast<uintptr_t>(pointer));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return THE_DEVICE; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {
    py::gil_scoped_acquire gil;
    ask("synchronize_device", py::make_tuple());
  }
};

void take_hooks() {
  static Hooks ours;
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  // Neither class has members, so the first word, which says whose methods answer, is all that differs.
  memcpy(static_cast<void*>(theirs), static_cast<void*>(&ours), sizeof(void*));
}

// DDP asks for one and needs no answer.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

// Operators that make or re-interpret tensors run at once; all others are kernels (operators.py).
using Sizes = c10::SymIntArrayRef;
using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

at::IntArrayRef ints(Sizes sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); }

at::Tensor empty(Sizes size, MaybeDtype dtype, MaybeLayout, MaybeDevice, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(ints(size), &device_allocator, KEYS, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Sizes size, Sizes stride, MaybeDtype dtype, MaybeLayout, MaybeDevice, std::optional<bool>) {
  return at::detail::empty_strided_generic(ints(size), ints(stride), &device_allocator, KEYS,
                                           c10::dtype_or_default(dtype));
}
const at::Tensor& resize_(const at::Tensor& self, Sizes size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(ints(size));
  size_t needed = (tensor->numel() + tensor->storage_offset()) * tensor->itemsize();
  if (tensor->numel() != 0 && needed > self.storage().nbytes()) {
    py::gil_scoped_acquire gil;
    ask("resize_storage", py::make_tuple(reinterpret_cast<uintptr_t>(self.storage().unsafeGetStorageImpl()), needed));
  }
  return self;
}
at::Tensor& point_at(at::Tensor& self, c10::Storage storage, at::IntArrayRef size, at::IntArrayRef stride,
                     int64_t offset) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_sizes_and_strides(size, stride, std::optional<int64_t>(offset));
  return self;
}
at::Tensor& set_region(at::Tensor& self, c10::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto sizes = ints(size).vec();
  auto strides = stride.empty() && !size.empty() ? at::detail::defaultStrides(sizes) : ints(stride).vec();
  return point_at(self, std::move(source), sizes, strides, offset.expect_int());
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  int64_t numel = source.nbytes() / self.itemsize();
  return point_at(self, std::move(source), {numel}, {1}, 0);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return point_at(self, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}
at::Tensor as_strided(const at::Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, ints(size), ints(stride), start);
}
at::Tensor view(const at::Tensor& self, Sizes size) { return at::native::view(self, ints(size)); }
at::Tensor reshape_alias(const at::Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, ints(size), ints(stride));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_region);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
}

at::Tensor open_view(uintptr_t address, int64_t offset, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, py::object dtype) {
  auto scalar_type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  auto options = at::TensorOptions().dtype(scalar_type).device(c10::kCPU);
  int64_t last = 0;
  bool is_empty = false;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    is_empty |= sizes[dim] == 0;
    last += (sizes[dim] - 1) * strides[dim];
  }
  if (address == 0) return at::empty_strided(sizes, strides, options);
  int64_t end = is_empty ? 0 : offset + (last + 1) * static_cast<int64_t>(c10::elementSize(scalar_type));
  return at::from_blob(arena().values(address, end) + offset, sizes, strides, options);
}

py::tuple replace_storage(uintptr_t storage_address, size_t num_bytes) {
  auto* storage = reinterpret_cast<c10::StorageImpl*>(storage_address);
  auto before = reinterpret_cast<uintptr_t>(storage->data());
  size_t num_common = std::min(storage->nbytes(), num_bytes);
  auto memory = device_allocator.allocate(num_bytes);
  auto after = reinterpret_cast<uintptr_t>(memory.get());
  // The former memory is freed with the capsule, once the caller has enqueued the copy.
  auto* former = new c10::DataPtr(storage->set_data_ptr(std::move(memory)));
  storage->set_nbytes(num_bytes);
  py::capsule owner(former, [](void* pointer) { delete static_cast<c10::DataPtr*>(pointer); });
  return py::make_tuple(before, after, num_common, owner);
}

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [](py::object python_scheduler) {
    scheduler = python_scheduler.release().ptr();
    c10::SetAllocator(c10::kCUDA, &device_allocator, 10);
    at::setHostAllocator(c10::kCUDA, &pinned_allocator, 10);
    take_hooks();
  });
  module.def("close", [] { is_closed = true; });
  module.def("current_stream", [] { return current_stream; });
  module.def("set_stream", [](int64_t number) { std::swap(current_stream, number); return number; });
  module.def("choose_device", [] { has_chosen_device = true; });
  module.def("has_chosen_device", [] { return has_chosen_device; });
  module.def("take_freed", [] { return arena().take_freed(); });
  module.def("spoil", [](uintptr_t address) { arena().spoil(address); });
  module.def("drop", [](uintptr_t address) { arena().drop(address); });
  module.def("stats", [] { return arena().stats(); });
  module.def("reset_peak", [] { arena().reset_peak(); });
  module.def("pin", [](uintptr_t address, size_t num_bytes) { arena().pin(address, num_bytes); });
  module.def("unpin", [](uintptr_t address) { arena().unpin(address); });
  module.def("is_pinned", [](uintptr_t address) { return arena().is_pinned(address); });
  module.def("region", [](const at::Tensor& tensor) {
    auto address = reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()->data());
    return std::make_pair(address, tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()));
  });
  module.def("open_view", &open_view);
  module.def("replace_storage", &replace_storage);
}
