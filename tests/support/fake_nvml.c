/* A libnvidia-ml.so.1 whose answers are lines "KEY VALUE" of the file that FAKE_NVML names; read again at each call.

   "gpu0.ANSWER 7" sets what GPU 0 answers, "gpu0.ANSWER.error 3" makes that question fail, "gpu0.error 15" all of them.
   "xid.serial" is a number that grows with each XID; "xid.gpu" and "xid.code" say which that is.
   With -DOLD_DRIVER it has none of the functions that old drivers lack. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6, TIMEOUT = 10 };
typedef struct { int index; } Device;
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } EventData;
typedef struct { unsigned version, sensor; int temperature; } TemperatureV1;

static Device devices[16];
static long serial_seen, num_registered;

static long value_of(const char *key, long fallback) {
    char name[128];
    long value, found = fallback;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (!file) return fallback;
    while (fscanf(file, "%127s %ld", name, &value) == 2)
        if (!strcmp(name, key)) found = value;
    fclose(file);
    return found;
}

static long of_gpu(const Device *device, const char *what, const char *end, long fallback) {
    char key[128];
    snprintf(key, sizeof key, "gpu%d%s%s%s", device->index, *what ? "." : "", what, end);
    return value_of(key, fallback);
}

static int answer(const Device *device, const char *what, long fallback, long *value) {
    int error = (int)of_gpu(device, "", ".error", 0);
    if (!error) error = (int)of_gpu(device, what, ".error", 0);
    if (error) return error;
    *value = of_gpu(device, what, "", fallback);
    return SUCCESS;
}

#define ANSWER(device, what, fallback, target, type)              \
    do {                                                           \
        long value;                                                \
        int error = answer(device, what, fallback, &value);        \
        if (error) return error;                                   \
        *(target) = (type)value;                                   \
        return SUCCESS;                                            \
    } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)value_of("init.error", 0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { (void)error; return "an error of the fake"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)value_of("count", 2); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    devices[index].index = (int)index;
    int error = (int)of_gpu(&devices[index], "handle", ".error", 0);
    if (error) return error;
    *device = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) { (void)uuid; (void)device; return NOT_FOUND; }

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned length) {
    long number;
    int error = answer(device, "uuid", device->index, &number);
    if (error) return error;
    snprintf(uuid, length, "GPU-%08ld-fake", number);
    return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *name, unsigned length) {
    long unused;
    int error = answer(device, "name", 0, &unused);
    if (error) return error;
    snprintf(name, length, "NVIDIA Fake 100");
    return SUCCESS;
}
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *target) {
    if (sensor) return INVALID_ARGUMENT;
    ANSWER(device, "temperature", 41, target, unsigned);
}
int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *target) {
    if (type != 1) return INVALID_ARGUMENT; /* of the multiprocessors */
    ANSWER(device, "clock", 1980, target, unsigned);
}
int nvmlDeviceGetMaxClockInfo(Device *device, int type, unsigned *target) {
    if (type != 1) return INVALID_ARGUMENT;
    ANSWER(device, "max_clock", 1980, target, unsigned);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *target) {
    ANSWER(device, "throttle", 0, target, unsigned long long);
}
int nvmlDeviceGetTotalEccErrors(Device *device, int error_type, int counter, unsigned long long *target) {
    if (error_type != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, volatile */
    ANSWER(device, "ecc", 0, target, unsigned long long);
}
int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, int *target) {
    ANSWER(device, "pages_pending", 0, target, int);
}
#ifndef OLD_DRIVER
int nvmlDeviceGetTemperatureV(Device *device, TemperatureV1 *target) {
    if (target->version != (sizeof *target | 1u << 24) || target->sensor) return INVALID_ARGUMENT;
    ANSWER(device, "temperature", 41, &target->temperature, int);
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *target) {
    ANSWER(device, "throttle", 0, target, unsigned long long);
}
int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    long value;
    int error = answer(device, "remap_pending", 0, &value);
    if (error) return error;
    *corrected = *uncorrected = 0;
    *pending = (unsigned)value;
    ANSWER(device, "remap_failed", 0, failed, unsigned);
}
#endif

int nvmlEventSetCreate(void **set) { static int one; *set = &one; serial_seen = value_of("xid.serial", 0); return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set) {
    (void)set;
    if (types != 8) return INVALID_ARGUMENT; /* nvmlEventTypeXidCriticalError */
    int error = (int)of_gpu(device, "events", ".error", 0);
    if (!error) num_registered++;
    return error;
}
int nvmlEventSetWait_v2(void *set, EventData *data, unsigned timeout_ms) {
    (void)set;
    int error = (int)value_of("wait.error", 0);
    if (error) return error;
    for (unsigned waited_ms = 0;; waited_ms += 5) {
        long serial = value_of("xid.serial", 0);
        if (num_registered && serial > serial_seen) {
            memset(data, 0, sizeof *data);
            data->device = &devices[value_of("xid.gpu", 0)];
            data->type = 8;
            data->data = (unsigned long long)value_of("xid.code", 0);
            serial_seen = serial;
            return SUCCESS;
        }
        if (waited_ms >= timeout_ms) return TIMEOUT;
        usleep(5000);
    }
}
