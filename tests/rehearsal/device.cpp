// Stand-ins for libcudart, libcuda and NVML: cards whose memory is host memory.
//
// torch's caching allocator, streams, events and pinned memory run on these as on a card. Copies
// and fills are done before their call returns, so that streams and events have nothing to wait
// for. A kernel that is launched has no CPU code: it fails, by name. Functions that are not here
// are those of the real libraries, which fail for want of a driver.
//
// REHEARSAL_CARDS: "name|bytes|major.minor|multiprocessors" a card, separated by ";".
// REHEARSAL_SMI=old: the driver is older than this CUDA runtime, and no card can be used.
// REHEARSAL_FOLDER: one file a process and card with its bytes, which mem_get_info and
// nvidia-smi of all processes read.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t PAGE = size_t(2) << 20;  // CUDA's own granularity
const bool OLD = [] { const char* smi = std::getenv("REHEARSAL_SMI"); return smi && std::string(smi) == "old"; }();
const int DRIVER = OLD ? 12010 : 13000;   // as nvidia-smi's 530 and 580
using Guard = std::lock_guard<std::recursive_mutex>;

struct Card {
  int index;
  std::string name;
  size_t bytes;
  int major, minor, processors;
  std::atomic<uint64_t>* mine = nullptr;  // bytes of this process, in a file that others read
  bool retained = false;
  std::string uuid() const {
    char text[64];
    int b = 0x11 * (index + 1);
    std::snprintf(text, sizeof text, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                  b, b, b, b, b, b, b, b, b, b, b, b, b, b, b, b);
    return text;
  }
};

struct Range { size_t size; int card; cudaMemoryType type; };

std::recursive_mutex lock;
std::map<uintptr_t, Range> ranges;       // what is allocated or registered, by its address
std::unordered_map<uint64_t, Range> handles;  // physical memory of expandable segments
std::map<uintptr_t, uint64_t> mapped;    // address -> handle
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last = error; }

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) parts.push_back(part);
  return parts;
}

std::vector<Card> installed() {
  const char* text = std::getenv("REHEARSAL_CARDS");
  std::vector<Card> cards;
  for (auto& card : split(text ? text : "", ';')) {
    auto f = split(card, '|');
    if (f.size() != 4) { std::fprintf(stderr, "REHEARSAL_CARDS: bad card %s\n", card.c_str()); std::_Exit(2); }
    Card one{int(cards.size()), f[0], std::stoull(f[1]), 0, 0, std::stoi(f[3])};
    std::sscanf(f[2].c_str(), "%d.%d", &one.major, &one.minor);
    cards.push_back(one);
  }
  return cards;
}

// The cards that CUDA_VISIBLE_DEVICES leaves, in its order; the fastest first, unless by the bus.
std::vector<Card> choose() {
  auto cards = installed();
  const char* order = std::getenv("CUDA_DEVICE_ORDER");
  if (!order || std::string(order) != "PCI_BUS_ID")
    std::stable_sort(cards.begin(), cards.end(), [](auto& a, auto& b) {
      return std::tuple(a.major, a.processors) > std::tuple(b.major, b.processors);
    });
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return cards;
  std::vector<Card> chosen;
  for (auto& word : split(visible, ',')) {
    bool number = !word.empty() && word.find_first_not_of("0123456789") == std::string::npos;
    auto is = [&](const Card& c) {
      return number ? std::to_string(&c - cards.data()) == word : word.size() > 4 && ("GPU-" + c.uuid()).rfind(word, 0) == 0;
    };
    auto found = std::find_if(cards.begin(), cards.end(), is);
    if (found == cards.end()) break;
    chosen.push_back(*found);
  }
  return chosen;
}

std::vector<Card>& cards() {
  static std::vector<Card> all = choose();
  return all;
}

bool known(int card) { return card >= 0 && card < int(cards().size()); }

// ---- bytes of a card, over all processes ----

std::string folder(const Card& card) {
  const char* base = std::getenv("REHEARSAL_FOLDER");
  return std::string(base ? base : "/tmp") + "/card" + std::to_string(card.index);
}

std::atomic<uint64_t>& mine(Card& card) {
  if (!card.mine) {
    ::mkdir(folder(card).c_str(), 0777);
    int file = ::open((folder(card) + "/" + std::to_string(getpid())).c_str(), O_RDWR | O_CREAT | O_TRUNC, 0666);
    void* at = MAP_FAILED;
    if (file >= 0 && ftruncate(file, 8) == 0) at = mmap(nullptr, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (at == MAP_FAILED) { std::perror("REHEARSAL_FOLDER"); std::_Exit(2); }
    card.mine = new (at) std::atomic<uint64_t>(0);
    const char* context = std::getenv("REHEARSAL_CONTEXT");
    *card.mine += context ? std::stoull(context) : 0;
  }
  return *card.mine;
}

// (process, bytes) of all that live; a file of a dead process is removed.
std::vector<std::pair<int, uint64_t>> users(const Card& card) {
  std::vector<std::pair<int, uint64_t>> found;
  DIR* dir = opendir(folder(card).c_str());
  for (dirent* entry; dir && (entry = readdir(dir));) {
    int pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::string path = folder(card) + "/" + entry->d_name;
    if (kill(pid, 0) != 0 && errno == ESRCH) { unlink(path.c_str()); continue; }
    uint64_t bytes = 0;
    int file = ::open(path.c_str(), O_RDONLY);
    if (file >= 0 && ::read(file, &bytes, 8) == 8) found.emplace_back(pid, bytes);
    if (file >= 0) close(file);
  }
  if (dir) closedir(dir);
  return found;
}

size_t used(const Card& card) {
  size_t sum = 0;
  for (auto& [pid, bytes] : users(card)) sum += bytes;
  return sum;
}

bool take(int card, size_t bytes) {
  Card& one = cards()[card];
  mine(one);
  if (used(one) + bytes > one.bytes) return false;
  mine(one) += bytes;
  return true;
}

void give(int card, size_t bytes) { mine(cards()[card]) -= bytes; }

const std::pair<const uintptr_t, Range>* range_of(const void* pointer) {
  auto after = ranges.upper_bound(uintptr_t(pointer));
  if (after == ranges.begin()) return nullptr;
  auto& found = *std::prev(after);
  return uintptr_t(pointer) < found.first + found.second.size ? &found : nullptr;
}

size_t paged(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

void* map(size_t bytes, int protection) {
  char* at = static_cast<char*>(mmap(nullptr, bytes + PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED) return nullptr;
  char* aligned = reinterpret_cast<char*>(paged(uintptr_t(at)));
  if (aligned > at) munmap(at, aligned - at);
  munmap(aligned + bytes, at + PAGE - aligned);
  return aligned;
}

void* handle() { return new char[64](); }  // a stream's or another object's address, and no more

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// ---- libcudart: devices ----

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = OLD ? 0 : int(cards().size());
  return *count ? cudaSuccess : failed(OLD ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) { *device = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (!known(device)) return failed(cudaErrorInvalidDevice);
  current = device;
  Guard guard(lock);
  cards()[device].retained = true;
  mine(cards()[device]);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { *version = DRIVER; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (!known(device)) return failed(cudaErrorInvalidDevice);
  Card& card = cards()[device];
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s", card.name.c_str());
  std::memset(&p->uuid, 0x11 * (card.index + 1), sizeof p->uuid);
  p->totalGlobalMem = card.bytes;
  p->major = card.major, p->minor = card.minor, p->multiProcessorCount = card.processors;
  p->warpSize = 32, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120, p->totalConstMem = 65536, p->textureAlignment = 512;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->asyncEngineCount = 1;
  p->managedMemory = p->streamPrioritiesSupported = p->cooperativeLaunch = p->hostRegisterSupported = 1;
  p->pciBusID = card.index + 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device)) return last;
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(p.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(p.sharedMemPerBlockOptin); break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCanMapHostMemory: case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, length, "0000:%02X:00.0", cards()[device].index + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) { *can = a != b; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
API cudaError_t cudaGetLastError() { auto error = last; last = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaSuccess ? "cudaSuccess" : "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}

// ---- libcudart: memory ----

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Guard guard(lock);
  if (!known(current)) return failed(cudaErrorNoDevice);
  size_t size = paged(std::max<size_t>(bytes, 1));
  *pointer = nullptr;
  if (!take(current, size)) return failed(cudaErrorMemoryAllocation);
  *pointer = map(size, PROT_READ | PROT_WRITE);
  if (!*pointer) { give(current, size); return failed(cudaErrorMemoryAllocation); }
  ranges[uintptr_t(*pointer)] = {size, current, cudaMemoryTypeDevice};
  return cudaSuccess;
}
API cudaError_t cudaFree(void* pointer) {
  if (!pointer) return known(current) ? cudaSetDevice(current) : failed(cudaErrorNoDevice);  // makes a context
  Guard guard(lock);
  auto found = ranges.find(uintptr_t(pointer));
  if (found == ranges.end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, found->second.size);
  give(found->second.card, found->second.size);
  ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Guard guard(lock);
  if (!known(current)) return failed(cudaErrorNoDevice);
  mine(cards()[current]);
  *total = cards()[current].bytes;
  size_t held = used(cards()[current]);
  *free = *total > held ? *total - held : 0;
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Guard guard(lock);
  size_t size = paged(std::max<size_t>(bytes, 1));
  *pointer = map(size, PROT_READ | PROT_WRITE);
  if (!*pointer) return failed(cudaErrorMemoryAllocation);
  ranges[uintptr_t(*pointer)] = {size, current, cudaMemoryTypeHost};
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
API cudaError_t cudaFreeHost(void* pointer) {
  Guard guard(lock);
  auto found = ranges.find(uintptr_t(pointer));
  if (found == ranges.end()) return failed(cudaErrorInvalidValue);
  munmap(pointer, found->second.size);
  ranges.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Guard guard(lock);
  if (range_of(pointer)) return failed(cudaErrorHostMemoryAlreadyRegistered);
  ranges[uintptr_t(pointer)] = {bytes, current, cudaMemoryTypeHost};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* pointer) {
  Guard guard(lock);
  return ranges.erase(uintptr_t(pointer)) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  Guard guard(lock);
  auto found = range_of(pointer);
  std::memset(a, 0, sizeof *a);
  a->type = found ? found->second.type : cudaMemoryTypeUnregistered;
  a->device = found ? found->second.card : -2;
  a->hostPointer = const_cast<void*>(pointer);
  a->devicePointer = found ? a->hostPointer : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++)
    std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) { std::memset(to, value, bytes); return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }

// ---- libcudart: streams, events, kernels ----

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = static_cast<cudaStream_t>(handle());
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t run, void* data) { run(data); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t run, void* data, unsigned) {
  run(stream, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(handle());
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { delete[] reinterpret_cast<char*>(event); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<int64_t*>(event) = std::chrono::steady_clock::now().time_since_epoch().count();
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = float(*reinterpret_cast<int64_t*>(b) - *reinterpret_cast<int64_t*>(a)) / 1e6f;
  return cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  std::memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

namespace {
std::unordered_map<const void*, const char*>& kernels() {
  static std::unordered_map<const void*, const char*> names;
  return names;
}
}  // namespace
API void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(handle()); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Guard guard(lock);
  kernels()[function] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  Guard guard(lock);
  auto found = kernels().find(function);
  std::fprintf(stderr, "rehearsal: no CPU code for kernel %s\n", found == kernels().end() ? "?" : found->second);
  return failed(cudaErrorNotSupported);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 a, dim3 b, void** c, size_t d, cudaStream_t e) {
  return cudaLaunchKernel(kernel, a, b, c, d, e);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return cudaLaunchKernel(function, {}, {}, nullptr, 0, nullptr);
}

// ---- libcuda ----

API CUresult cuInit(unsigned) { return cards().empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { *version = DRIVER; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* count) { *count = int(cards().size()); return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return known(index) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  std::snprintf(name, length, "%s", cards()[device].name.c_str());
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  return CUresult(cudaDeviceGetAttribute(value, cudaDeviceAttr(which), device));
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = cards()[device].retained;
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of a rehearsed driver";
  return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = PAGE;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* found = map(paged(bytes), PROT_NONE);
  *at = CUdeviceptr(found);
  return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  munmap(reinterpret_cast<void*>(at), paged(bytes));
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop, unsigned long long) {
  Guard guard(lock);
  static uint64_t next = 1;
  if (!take(prop->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  handles[*handle = next++] = {bytes, prop->location.id, cudaMemoryTypeDevice};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Guard guard(lock);
  auto found = handles.find(handle);
  if (found == handles.end()) return CUDA_ERROR_INVALID_VALUE;
  give(found->second.card, found->second.size);
  handles.erase(found);
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  Guard guard(lock);
  if (mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
  ranges[at] = {bytes, handles[handle].card, cudaMemoryTypeDevice};
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  Guard guard(lock);
  for (auto one = ranges.lower_bound(at); one != ranges.end() && one->first < at + bytes;) one = ranges.erase(one);
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr at) {
  Guard guard(lock);
  auto found = range_of(reinterpret_cast<void*>(at));
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  *base = found->first, *size = found->second.size;
  return CUDA_SUCCESS;
}
namespace { CUresult absent() { return CUDA_ERROR_NOT_SUPPORTED; } }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* status) {
  static void* self = [] { Dl_info info; dladdr(reinterpret_cast<void*>(&cuInit), &info); return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); }();
  void* found = dlsym(self, name);
  if (!found) found = dlsym(self, (std::string(name) + "_v2").c_str());
  *function = found ? found : reinterpret_cast<void*>(&absent);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---- NVML, as far as torch reads it (c10/cuda/driver_api.h, torch/cuda/__init__.py) ----

namespace {
struct Process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };
enum { NVML_SUCCESS = 0, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7 };
// NVML counts all cards, in the order of the bus, whatever is visible to CUDA.
std::vector<Card>& bus() { static std::vector<Card> all = installed(); return all; }
}  // namespace
API int nvmlInit() { return bus().empty() ? 9 : NVML_SUCCESS; }
API int nvmlInit_v2() { return nvmlInit(); }
API int nvmlShutdown() { return NVML_SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned* count) { *count = unsigned(bus().size()); return NVML_SUCCESS; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = DRIVER; return NVML_SUCCESS; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= bus().size()) return NVML_NOT_FOUND;
  *device = &bus()[index];
  return NVML_SUCCESS;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain, number;
  if (std::sscanf(id, "%x:%x", &domain, &number) != 2) return NVML_NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}
API int nvmlDeviceGetHandleByUUID(const char*, void**) { return NVML_NOT_FOUND; }
API int nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  std::snprintf(text, length, "GPU-%s", static_cast<Card*>(device)->uuid().c_str());
  return NVML_SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, Process* found) {
  auto all = users(*static_cast<Card*>(device));
  bool fits = *count >= all.size();
  for (size_t i = 0; fits && i < all.size(); i++) found[i] = {unsigned(all[i].first), all[i].second, ~0u, ~0u};
  *count = unsigned(all.size());
  return fits ? NVML_SUCCESS : NVML_TOO_SMALL;
}
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetP2PStatus(void*, void*, int, int*) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV(void* device, char* info) { info[28] = 0; return NVML_SUCCESS; }  // no fabric
API const char* nvmlErrorString(int) { return "error of a rehearsed driver"; }

// ---- the driver's device file, which programs look for ----

API int stat(const char* path, struct stat* found) {
  bool driver = path && std::strcmp(path, "/dev/nvidiactl") == 0 && !installed().empty();
  return int(syscall(SYS_newfstatat, AT_FDCWD, driver ? "/dev/null" : path, found, 0));
}
API int stat64(const char* path, struct stat64* found) { return stat(path, reinterpret_cast<struct stat*>(found)); }
