/* NVIDIA's management library of a machine with two GPUs, for tests; NVML_INIT is what nvmlInit
   returns, NVML_COUNT what
   nvmlDeviceGetCount returns, NVML_CUDA the version of CUDA that the driver runs. */
#include <stdlib.h>
#include <string.h>

struct memory { unsigned long long total, free, used; };

static int number(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}

int nvmlInit_v2(void) { return number("NVML_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  strncpy(text, "550.54.14", length);
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = number("NVML_CUDA", 12040);
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 2;
  return number("NVML_COUNT", 0);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(0x7f0000000000ul + index); /* needs all 64 bits */
  return 0;
}
static int index_of(void *handle) { return (int)((unsigned long)handle - 0x7f0000000000ul); }
int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
  strncpy(text, index_of(handle) ? "NVIDIA GB10" : "NVIDIA H100", length);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
  if (index_of(handle)) return 3; /* not supported */
  memory->total = 80ull << 30;
  memory->free = 79ull << 30;
  memory->used = 1ull << 30;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = index_of(handle) ? 12 : 9;
  *minor = index_of(handle) ? 1 : 0;
  return 0;
}
