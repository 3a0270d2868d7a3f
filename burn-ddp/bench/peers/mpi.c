/* All-reduce with an installed MPI, in rounds that the driver commands. See src/driver_protocol.rs for the protocol.
 *
 * usage: mpirun -n WORLD mpi CONTROL_SOCKET DTYPE   (f32 or f64) */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PERIOD 1021 /* elements until the input pattern repeats */

static int rank, world, wide;
static size_t length, count;
static void **inputs, **outputs;

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static double cpu_ns(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e9 + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e3;
}

static int value(size_t i, int of_rank, long seed) {
    return 1 + (int)((5 * (i % PERIOD) + 3 * (size_t)of_rank + (size_t)seed) % 8);
}

static void fill(size_t nth, long seed) {
    for (size_t i = 0; i < length; i++) {
        if (wide) ((double *)inputs[nth])[i] = value(i, rank, seed);
        else ((float *)inputs[nth])[i] = (float)value(i, rank, seed);
    }
}

/* The first wrong element, or -1. */
static long wrong(size_t nth, long seed) {
    int expected[PERIOD];
    for (size_t i = 0; i < PERIOD; i++) {
        expected[i] = 0;
        for (int r = 0; r < world; r++) expected[i] += value(i, r, seed);
    }
    for (size_t i = 0; i < length; i++) {
        double got = wide ? ((double *)outputs[nth])[i] : ((float *)outputs[nth])[i];
        if (got != expected[i % PERIOD]) return (long)i;
    }
    return -1;
}

static void step(size_t nth) {
    nth %= count;
    if (length == 0) MPI_Barrier(MPI_COMM_WORLD);
    else MPI_Allreduce(inputs[nth], outputs[nth], (int)length, wide ? MPI_DOUBLE : MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void release(void) {
    for (size_t i = 0; i < count; i++) {
        free(inputs[i]);
        free(outputs[i]);
    }
    free(inputs);
    free(outputs);
    inputs = outputs = NULL;
    count = length = 0;
}

static int prepare(size_t bytes, size_t buffers) {
    release();
    inputs = calloc(buffers, sizeof *inputs);
    outputs = calloc(buffers, sizeof *outputs);
    if (!inputs || !outputs) return 0;
    length = bytes / (wide ? 8 : 4);
    count = buffers;
    for (size_t i = 0; i < buffers; i++) {
        inputs[i] = malloc(bytes + 64);
        outputs[i] = malloc(bytes + 64);
        if (!inputs[i] || !outputs[i]) return 0;
        memset(inputs[i], 0, bytes);
        memset(outputs[i], 0, bytes);
    }
    return 1;
}

static void one_round(FILE *out, long seed, long samples, long per_sample, long warmup, long late_rank, long late_us) {
    for (size_t nth = 0; nth < count; nth++) fill(nth, seed + (long)nth);
    size_t steps = 0;
    for (long i = 0; i < warmup; i++) step(steps++);
    double *times = malloc(sizeof(double) * (size_t)samples);
    double before = cpu_ns();
    for (long s = 0; s < samples; s++) {
        if (rank == late_rank) usleep((useconds_t)late_us);
        double start = now_ns();
        for (long i = 0; i < per_sample; i++) step(steps++);
        times[s] = (now_ns() - start) / (double)per_sample;
    }
    double cpu = cpu_ns() - before;
    long bad = -1;
    for (size_t nth = 0; nth < count && nth < steps && bad < 0; nth++) bad = wrong(nth, seed + (long)nth);
    fill(0, seed + (long)count);
    step(0);
    if (bad < 0) bad = wrong(0, seed + (long)count);
    if (bad >= 0) {
        fprintf(out, "error wrong sum at element %ld\n", bad);
    } else {
        fprintf(out, "ok %.0f", cpu);
        for (long s = 0; s < samples; s++) fprintf(out, " %.1f", times[s]);
        fprintf(out, "\n");
    }
    free(times);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 3) return 2;
    wide = strcmp(argv[2], "f64") == 0;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", argv[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror("connect");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    fprintf(out, "hello %d\n", rank);
    fflush(out);
    char line[256];
    /* Blocks in a read between rounds: a rank that waits in MPI would spin and disturb the others. */
    while (fgets(line, sizeof line, in) && strncmp(line, "quit", 4) != 0) {
        long n[6];
        size_t bytes, buffers;
        if (sscanf(line, "prepare %zu %zu", &bytes, &buffers) == 2) {
            fprintf(out, prepare(bytes, buffers) ? "ok\n" : "error out of memory\n");
        } else if (sscanf(line, "round %ld %ld %ld %ld %ld %ld", n, n + 1, n + 2, n + 3, n + 4, n + 5) == 6) {
            one_round(out, n[0], n[1], n[2], n[3], n[4], n[5]);
        } else {
            fprintf(out, "error unknown command %s", line);
        }
        fflush(out);
    }
    MPI_Finalize();
    return 0;
}
