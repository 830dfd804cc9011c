// A stand-in for NCCL: collectives between processes of one machine, over a file that they map.
//
// Each call is done before it returns, in chunks: every rank writes into a slot of its own, all
// meet, each reads what it needs, all meet again. What is sent to one peer lies in a file until it
// is received, so that a send waits for nobody.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr size_t SLOT = size_t(1) << 20;

struct Shared {
  std::atomic<int> joined, arrived, generation, left;
  std::atomic<int> colors[64], keys[64];
};

}  // namespace

struct ncclComm {
  std::string path;
  int ranks, rank, device;
  Shared* shared;
  char* slots;
  std::atomic<bool> aborted{false};
  std::vector<int> sent, received;
  int splits = 0;
  char* slot(int rank) const { return slots + rank * SLOT; }
};

namespace {

// Waits until `done`; false if the communicator is aborted meanwhile.
bool wait(ncclComm* comm, const std::function<bool()>& done) {
  for (long turn = 0; !done(); turn++) {
    if (comm->aborted) return false;
    timespec pause{0, turn < 100 ? 10000 : 200000};
    if (turn > 20) nanosleep(&pause, nullptr); else sched_yield();
  }
  return true;
}

bool meet(ncclComm* comm) {
  int generation = comm->shared->generation;
  if (comm->shared->arrived.fetch_add(1) + 1 == comm->ranks) {
    comm->shared->arrived = 0;
    comm->shared->generation++;
    return true;
  }
  return wait(comm, [=] { return comm->shared->generation != generation; });
}

ncclResult_t join(ncclComm_t* out, const std::string& path, int ranks, int rank) {
  auto* comm = new ncclComm{path, ranks, rank, 0};
  if (cudaGetDevice(&comm->device)) return ncclUnhandledCudaError;
  size_t size = sizeof(Shared) + ranks * SLOT;
  int file = open(path.c_str(), O_RDWR | O_CREAT, 0666);
  if (file < 0 || ftruncate(file, size)) { std::perror(path.c_str()); return ncclSystemError; }
  void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return ncclSystemError;
  comm->shared = static_cast<Shared*>(at);
  comm->slots = static_cast<char*>(at) + sizeof(Shared);
  comm->sent.resize(ranks), comm->received.resize(ranks);
  comm->shared->joined++;
  *out = comm;
  return wait(comm, [=] { return comm->shared->joined >= ranks; }) ? ncclSuccess : ncclSystemError;
}

size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

// Premultiplied sums: the operator's number from ncclNumOps on, with its factor.
std::vector<double>& factors() { static std::vector<double> all; return all; }

template <class T, class Wide>
void reduce_as(void* out, const std::vector<const char*>& parts, size_t count, int op) {
  double factor = op >= ncclNumOps ? factors()[op - ncclNumOps] : 1.0;
  for (size_t i = 0; i < count; i++) {
    Wide sum = Wide(reinterpret_cast<const T*>(parts[0])[i]);
    for (size_t r = 1; r < parts.size(); r++) {
      Wide one = Wide(reinterpret_cast<const T*>(parts[r])[i]);
      sum = op == ncclProd ? Wide(sum * one) : op == ncclMax ? std::max(sum, one) : op == ncclMin ? std::min(sum, one) : Wide(sum + one);
    }
    if (op == ncclAvg) sum = Wide(sum / Wide(parts.size()));
    if (op >= ncclNumOps) sum = Wide(sum * factor);
    static_cast<T*>(out)[i] = T(sum);
  }
}

void reduce(void* out, const std::vector<const char*>& parts, size_t count, ncclDataType_t type, int op) {
  switch (type) {
    case ncclInt8: return reduce_as<int8_t, int>(out, parts, count, op);
    case ncclUint8: return reduce_as<uint8_t, int>(out, parts, count, op);
    case ncclInt32: return reduce_as<int32_t, int32_t>(out, parts, count, op);
    case ncclUint32: return reduce_as<uint32_t, uint32_t>(out, parts, count, op);
    case ncclInt64: return reduce_as<int64_t, int64_t>(out, parts, count, op);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(out, parts, count, op);
    case ncclFloat16: return reduce_as<c10::Half, float>(out, parts, count, op);
    case ncclBfloat16: return reduce_as<c10::BFloat16, float>(out, parts, count, op);
    case ncclFloat32: return reduce_as<float, float>(out, parts, count, op);
    default: return reduce_as<double, double>(out, parts, count, op);
  }
}

// ---- the collectives; sizes in bytes ----

// `put` writes bytes [at, at + size) of what this rank gives into its slot, `get` reads the slots.
using Step = std::function<void(size_t at, size_t size)>;
ncclResult_t in_chunks(ncclComm* comm, size_t bytes, size_t chunk, const Step& put, const Step& get) {
  for (size_t at = 0; at < bytes; at += chunk) {
    size_t size = std::min(chunk, bytes - at);
    put(at, size);
    if (!meet(comm)) return ncclRemoteError;
    get(at, size);
    if (!meet(comm)) return ncclRemoteError;
  }
  return ncclSuccess;
}

ncclResult_t all_reduce(ncclComm* comm, const char* in, char* out, size_t bytes, ncclDataType_t type, int op, int root) {
  auto put = [=](size_t at, size_t size) { std::memcpy(comm->slot(comm->rank), in + at, size); };
  auto get = [=](size_t at, size_t size) {
    if (root >= 0 && root != comm->rank) return;
    std::vector<const char*> parts;
    for (int r = 0; r < comm->ranks; r++) parts.push_back(comm->slot(r));
    reduce(out + at, parts, size / width(type), type, op);
  };
  return in_chunks(comm, bytes, SLOT, put, get);
}

ncclResult_t broadcast(ncclComm* comm, const char* in, char* out, size_t bytes, int root) {
  auto put = [=](size_t at, size_t size) { if (comm->rank == root) std::memcpy(comm->slot(root), in + at, size); };
  auto get = [=](size_t at, size_t size) { std::memmove(out + at, comm->slot(root), size); };
  return in_chunks(comm, bytes, SLOT, put, get);
}

ncclResult_t all_gather(ncclComm* comm, const char* in, char* out, size_t bytes) {
  auto put = [=](size_t at, size_t size) { std::memcpy(comm->slot(comm->rank), in + at, size); };
  auto get = [=](size_t at, size_t size) {
    for (int r = 0; r < comm->ranks; r++) std::memcpy(out + r * bytes + at, comm->slot(r), size);
  };
  return in_chunks(comm, bytes, SLOT, put, get);
}

// Each rank's slot has a part for each rank; `take` is given the parts that are for this one.
ncclResult_t exchange(ncclComm* comm, const char* in, size_t bytes,
                      const std::function<void(const std::vector<const char*>&, size_t, size_t)>& take) {
  size_t chunk = SLOT / comm->ranks / 16 * 16;
  auto put = [=](size_t at, size_t size) {
    for (int r = 0; r < comm->ranks; r++) std::memcpy(comm->slot(comm->rank) + r * chunk, in + r * bytes + at, size);
  };
  auto get = [&](size_t at, size_t size) {
    std::vector<const char*> parts;
    for (int r = 0; r < comm->ranks; r++) parts.push_back(comm->slot(r) + comm->rank * chunk);
    take(parts, at, size);
  };
  return in_chunks(comm, bytes, chunk, put, get);
}

std::string message(ncclComm* comm, int from, int to, int number) {
  return comm->path + "-" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

ncclResult_t send(ncclComm* comm, const void* in, size_t bytes, int peer) {
  std::string path = message(comm, comm->rank, peer, comm->sent[peer]++);
  FILE* file = std::fopen((path + "~").c_str(), "wb");
  if (!file) return ncclSystemError;
  bool whole = std::fwrite(in, 1, bytes, file) == bytes;
  whole &= std::fclose(file) == 0;
  return whole && !std::rename((path + "~").c_str(), path.c_str()) ? ncclSuccess : ncclSystemError;
}

ncclResult_t receive(ncclComm* comm, void* out, size_t bytes, int peer) {
  std::string path = message(comm, peer, comm->rank, comm->received[peer]++);
  if (!wait(comm, [&] { return access(path.c_str(), R_OK) == 0; })) return ncclRemoteError;
  FILE* file = std::fopen(path.c_str(), "rb");
  bool whole = file && std::fread(out, 1, bytes, file) == bytes;
  if (file) std::fclose(file);
  unlink(path.c_str());
  return whole ? ncclSuccess : ncclSystemError;
}

// ---- groups: what is issued between start and end runs at the end, sends first ----

thread_local int depth = 0;
thread_local std::vector<std::pair<bool, std::function<ncclResult_t()>>> issued;

ncclResult_t run_issued() {
  auto all = std::move(issued);
  issued.clear();
  std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first > b.first; });
  for (auto& [is_send, run] : all)
    if (auto result = run()) return result;
  return ncclSuccess;
}

ncclResult_t issue(std::function<ncclResult_t()> run, bool is_send = false) {
  issued.emplace_back(is_send, std::move(run));
  return depth ? ncclSuccess : run_issued();
}

const char* raw(const void* p) { return static_cast<const char*>(p); }
char* raw(void* p) { return static_cast<char*>(p); }

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
API const char* ncclGetErrorString(ncclResult_t result) { return result ? "remote process exited or there was a network error" : "no error"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int number = 0;
  const char* folder = std::getenv("REHEARSAL_FOLDER");
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  std::snprintf(id->internal, sizeof id->internal, "%s/nccl-%d-%d-%ld", folder ? folder : "/tmp", getpid(), number++, now.tv_nsec);
  return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) { return join(comm, id.internal, ranks, rank); }
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, id.internal, ranks, rank);
}
API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return join(comm, ids[0].internal, ranks, rank);
}
API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  comm->shared->colors[comm->rank] = color, comm->shared->keys[comm->rank] = key;
  int split = comm->splits++;
  if (!meet(comm)) return ncclRemoteError;
  std::vector<std::pair<int, int>> same;
  for (int r = 0; r < comm->ranks; r++)
    if (comm->shared->colors[r] == color) same.emplace_back(comm->shared->keys[r], r);
  std::sort(same.begin(), same.end());
  if (!meet(comm)) return ncclRemoteError;
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = int(std::find(same.begin(), same.end(), std::pair(key, comm->rank)) - same.begin());
  return join(out, comm->path + "-s" + std::to_string(split) + "c" + std::to_string(color), int(same.size()), rank);
}
API ncclResult_t ncclCommAbort(ncclComm_t comm) { comm->aborted = true; return ncclSuccess; }
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (++comm->shared->left == comm->ranks) unlink(comm->path.c_str());
  return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->aborted ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { *count = comm->ranks; return ncclSuccess; }
API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { *device = comm->device; return ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { *rank = comm->rank; return ncclSuccess; }
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) { *handle = nullptr; return ncclSuccess; }
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclMemAlloc(void** pointer, size_t size) { return cudaMalloc(pointer, size) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclGroupStart() { depth++; return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : run_issued(); }
API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  double factor = type == ncclFloat64 ? *static_cast<double*>(scalar) : type == ncclFloat16 ? float(*static_cast<c10::Half*>(scalar))
                : type == ncclBfloat16 ? float(*static_cast<c10::BFloat16*>(scalar)) : *static_cast<float*>(scalar);
  factors().push_back(factor);
  *op = ncclRedOp_t(ncclNumOps + factors().size() - 1);
  return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

API ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return all_reduce(comm, raw(in), raw(out), count * width(type), type, op, -1); });
}
API ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return all_reduce(comm, raw(in), raw(out), count * width(type), type, op, root); });
}
API ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return broadcast(comm, raw(in), raw(out), count * width(type), root); });
}
API ncclResult_t ncclBcast(void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(out, out, count, type, root, comm, stream);
}
API ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return all_gather(comm, raw(in), raw(out), count * width(type)); });
}
API ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t) {
  return issue([=] {
    return exchange(comm, raw(in), count * width(type), [=](auto& parts, size_t from, size_t size) {
      reduce(raw(out) + from, parts, size / width(type), type, op);
    });
  });
}
API ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t) {
  size_t bytes = count * width(type);
  return issue([=] {
    return exchange(comm, raw(in), bytes, [=](auto& parts, size_t from, size_t size) {
      for (int r = 0; r < comm->ranks; r++) std::memcpy(raw(out) + r * bytes + from, parts[r], size);
    });
  });
}
API ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return send(comm, in, count * width(type), peer); }, true);
}
API ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
  return issue([=] { return receive(comm, out, count * width(type), peer); });
}
