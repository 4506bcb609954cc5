/*
 * Blocks one after another; in a block every warp runs until all its lanes wait for others or have ended.
 * The last that arrives at a barrier or collective completes it for all. Nobody able to run before all have
 * ended: the kernel waits for a thread that does not come, which ends the program.
 */
#include "tests/simt/internal.h"

#include <map>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

thread_local simt_place *simt_now;
thread_local simt_machine simt_m;

static thread_local simt_hook hook_now;
static thread_local void *hook_arg;
static thread_local int sms = 4;
static thread_local std::map<const void *, size_t> allowed;

#define MAX_THREADS 1024
#define SHARED_AT_ONCE ((size_t)48 << 10) /* more must be asked for */
#define SHARED_AT_MOST ((size_t)227 << 10)

/* cudaError_t, as far as launches return it */
#define INVALID_VALUE 1
#define INVALID_CONFIGURATION 9

/* ---- messages ---- */

static void say_where(const simt_thread *t)
{
	const simt_place *p = &t->place;

	fprintf(stderr, "block (%u,%u,%u) thread (%u,%u,%u)", p->block.x, p->block.y, p->block.z, p->thread.x,
	        p->thread.y, p->thread.z);
}

void simt_fail(const char *fmt, ...)
{
	va_list ap;

	fprintf(stderr, "simt: %s: ", simt_m.job ? simt_m.job->name : "no kernel");
	if (simt_now) {
		say_where((const simt_thread *)(const void *)simt_now);
		fprintf(stderr, ": ");
	}
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, "\n");
	abort();
}

static void nobody_can_run(void)
{
	simt_machine *m = &simt_m;
	int said = 0, ended = 0;

	fprintf(stderr, "simt: %s: threads wait for others that do not come\n", m->job->name);
	for (int i = 0; i < m->n; i++) {
		simt_thread *t = m->threads[i];

		if (t->state == SIMT_DONE) {
			ended++;
		} else if (said++ < 8) {
			fprintf(stderr, "simt: ");
			say_where(t);
			fprintf(stderr, " waits at %s, lanes %08x\n", t->what, t->mask);
		}
	}
	fprintf(stderr, "simt: %d of %d threads have ended, %d wait\n", ended, m->n, said);
	abort();
}

/* ---- one block ---- */

static void thread_run(void *arg)
{
	simt_thread *t = (simt_thread *)arg;

	simt_order_acquire(&simt_m.begun);
	simt_m.job->body();
	t->copies.clear(); /* nobody waited for them */
	t->state = SIMT_DONE;
	simt_order_release(&simt_m.ended);
}

void simt_wait(simt_thread *t, simt_state state, const char *what)
{
	t->state = state;
	t->what = what;
	simt_fiber_leave(&simt_m.home, &t->fiber);
}

/* A permutation of 0 .. n-1 that changes from block to block. */
static int in_turn(int i, int n, unsigned int order)
{
	switch (order % 3) {
	case 0:
		return i;
	case 1:
		return n - 1 - i;
	default:
		return n % 2 == 0 && n % 3 != 0 ? (int)((i * 3u + 1) % (unsigned int)n) : (i + n / 2) % n;
	}
}

static void run_warp(int first, int lanes, unsigned int order)
{
	for (bool ran = true; ran;) {
		ran = false;
		for (int i = 0; i < lanes; i++) {
			simt_thread *t = simt_m.threads[first + in_turn(i, lanes, order)];

			if (t->state != SIMT_READY)
				continue;
			simt_now = &t->place;
			simt_fiber_enter(&simt_m.home, &t->fiber);
			simt_now = NULL;
			ran = true;
		}
	}
}

static int count_in(simt_state state)
{
	int n = 0;

	for (int i = 0; i < simt_m.n; i++)
		n += simt_m.threads[i]->state == state;
	return n;
}

static void *junk(size_t bytes)
{
	void *p = NULL;

	if (posix_memalign(&p, 16, bytes)) {
		perror("simt: shared memory");
		abort();
	}
	memset(p, 0xff, bytes);
	return p;
}

static void run_block(uint3 at)
{
	simt_machine *m = &simt_m;
	dim3 b = m->job->block;
	int warps = (m->n + 31) / 32;

	m->arrived = 0;
	m->dynamic = m->job->shared ? junk(m->job->shared) : NULL;
	m->shared_bytes = m->job->shared;
	for (int i = 0; i < m->n; i++) {
		simt_thread *t = m->threads[i];
		unsigned int k = (unsigned int)i;

		t->place.thread = uint3{k % b.x, k / b.x % b.y, k / b.x / b.y};
		t->place.block = at;
		t->place.block_dim = b;
		t->place.grid_dim = m->job->grid;
		t->place.lane = i % 32;
		t->state = SIMT_READY;
		t->group = 0;
	}
	simt_order_release(&m->begun);
	while (count_in(SIMT_READY) > 0)
		for (int w = 0; w < warps; w++) {
			int first = 32 * in_turn(w, warps, m->blocks / 3);

			run_warp(first, m->n - first < 32 ? m->n - first : 32, m->blocks);
		}
	if (count_in(SIMT_DONE) < m->n)
		nobody_can_run();
	simt_order_acquire(&m->ended);
	for (const simt_piece &p : m->pieces)
		free(p.p);
	m->pieces.clear();
	free(m->dynamic);
	m->blocks++;
}

/* ---- launches ---- */

static int check(const simt_job *j)
{
	const dim3 &g = j->grid, &b = j->block;
	auto may = allowed.find(j->kernel);

	if (g.x < 1 || g.y < 1 || g.z < 1 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535 || b.x < 1 ||
	        b.y < 1 || b.z < 1 || b.z > 64 || (size_t)b.x * b.y * b.z > MAX_THREADS)
		return INVALID_CONFIGURATION;
	return j->shared > (may == allowed.end() ? SHARED_AT_ONCE : may->second) ? INVALID_VALUE : 0;
}

void simt_job_run(struct simt_job *job)
{
	simt_machine *m = &simt_m;

	if (m->job)
		simt_fail("launches %s", job->name);
	m->job = job;
	m->n = (int)(job->block.x * job->block.y * job->block.z);
	while ((int)m->threads.size() < m->n) {
		simt_thread *t = new simt_thread();

		simt_fiber_init(&t->fiber, thread_run, t);
		m->threads.push_back(t);
	}
	for (unsigned int z = 0; z < job->grid.z; z++)
		for (unsigned int y = 0; y < job->grid.y; y++)
			for (unsigned int x = 0; x < job->grid.x; x++)
				run_block(uint3{x, y, z});
	m->job = NULL;
}

simt_machine::~simt_machine()
{
	for (simt_thread *t : threads) {
		simt_fiber_finish(&t->fiber);
		delete t;
	}
}

int simt_submit(struct CUstream_st *s, simt_job *job)
{
	int err = check(job);

	if (err) {
		delete job;
		return err;
	}
	if (hook_now)
		return hook_now(hook_arg, s, job);
	simt_job_run(job);
	delete job;
	return 0;
}

void simt_set_hook(simt_hook hook, void *arg)
{
	hook_now = hook;
	hook_arg = arg;
}

void simt_set_sms(int n)
{
	sms = n;
}

int fs_sms(void)
{
	return sms;
}

const char *simt_job_name(const struct simt_job *job)
{
	return job->name;
}

void simt_job_drop(struct simt_job *job)
{
	delete job;
}

int simt_allow_shared(const void *kernel, size_t bytes)
{
	if (bytes > SHARED_AT_MOST)
		return INVALID_VALUE;
	allowed[kernel] = bytes;
	return 0;
}

/* ---- shared memory ---- */

void *simt_shared(const void *key, size_t bytes)
{
	simt_machine *m = &simt_m;
	auto may = allowed.find(m->job->kernel);

	for (const simt_piece &p : m->pieces) {
		if (p.key == key) {
			simt_order_acquire(p.p);
			return p.p;
		}
	}
	m->shared_bytes += bytes;
	if (m->shared_bytes > (may == allowed.end() ? SHARED_AT_ONCE : SHARED_AT_MOST))
		simt_fail("%zu bytes of shared memory", m->shared_bytes);
	m->pieces.push_back(simt_piece{key, junk(bytes)});
	/* a card's is there before any thread: the one that happened to make this races with none */
	simt_order_release(m->pieces.back().p);
	return m->pieces.back().p;
}

void *simt_dynamic(void)
{
	if (!simt_m.dynamic)
		simt_fail("launched without the shared memory that it uses");
	return simt_m.dynamic;
}

/* ---- barriers of the block ---- */

/* All threads' votes for the last barrier; the sum is kept until the next is complete. */
static int barrier(const char *what, int vote)
{
	simt_machine *m = &simt_m;
	simt_thread *t = simt_thread_now();
	char *at = &m->barrier.at[m->barrier.turn & 1];

	if (m->arrived == 0)
		m->votes = 0;
	m->votes += vote;
	simt_order_release(at);
	if (++m->arrived < m->n) {
		t->mask = 0xffffffffu;
		simt_wait(t, SIMT_AT_BARRIER, what);
	} else {
		m->arrived = 0;
		m->barrier.turn++;
		m->result = m->votes;
		for (int i = 0; i < m->n; i++) {
			simt_thread *o = m->threads[i];

			if (o != t && o->what != what)
				simt_fail("is at %s, others are at %s", what, o->what);
			o->state = SIMT_READY;
		}
	}
	simt_order_acquire(at);
	return m->result;
}

void __syncthreads(void)
{
	static const char name[] = "__syncthreads";

	barrier(name, 0);
}

int __syncthreads_count(int v)
{
	static const char name[] = "__syncthreads_count";

	return barrier(name, v != 0);
}

int __syncthreads_or(int v)
{
	static const char name[] = "__syncthreads_or";

	return barrier(name, v != 0) != 0;
}
