/*
 * launches: a hand on what kernels the emulation runs, for tests in C: to count them, to let one fail, to
 * keep them and run them later as a recorded graph does. One hook a thread, for that thread's launches.
 */
#ifndef FS_TESTS_SIMT_LAUNCHES_H
#define FS_TESTS_SIMT_LAUNCHES_H

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
struct simt_job;

/* Called for every launch instead of running it; returns what the launch returns. It owns the job: to run it,
 * now or later and as often as it likes, then to drop it. */
typedef int (*simt_hook)(void *arg, struct CUstream_st *s, struct simt_job *job);
void simt_set_hook(simt_hook hook, void *arg); /* NULL: launches run at once */

const char *simt_job_name(const struct simt_job *job); /* the words of the FS_LAUNCH */
void simt_job_run(struct simt_job *job);
void simt_job_drop(struct simt_job *job);

/* How many multiprocessors kernels that ask are told, on this thread; 4 unless set. */
void simt_set_sms(int n);

#ifdef __cplusplus
}
#endif

#endif
