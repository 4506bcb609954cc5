/*
 * Fibers by a switch of eight registers where the processor is known, by ucontext elsewhere. Sanitizers are
 * told of every switch, or they would take one stack's frames for another's.
 */
#include "tests/simt/fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define STACK ((size_t)256 << 10)
#define GUARD ((size_t)4096)

#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(FS_SIMT_TSAN)
#define TSAN 1
#endif

#ifdef ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef TSAN
#include <sanitizer/tsan_interface.h>

extern "C" void __tsan_read16(void *at);
extern "C" void __tsan_write16(void *at);
#endif

static thread_local struct simt_home *home_now;

static void before(void **fake, const void *bottom, size_t size, void *tsan)
{
#ifdef ASAN
	__sanitizer_start_switch_fiber(fake, bottom, size);
#endif
#ifdef TSAN
	__tsan_switch_to_fiber(tsan, __tsan_switch_to_fiber_no_sync);
#endif
}

static void after(void *fake, const void **bottom, size_t *size)
{
#ifdef ASAN
	__sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

static void fiber_main(struct simt_fiber *f)
{
	after(NULL, &home_now->bottom, &home_now->size);
	for (;;) {
		f->run(f->arg);
		simt_fiber_leave(home_now, f);
	}
}

#if defined(__x86_64__)

/* Saves what a call must keep, stores the stack's end in *from, and goes on where `to` was stored. */
extern "C" void simt_switch(void **from, void *to);
__asm__(".text\n"
        ".globl simt_switch\n"
        ".type simt_switch, @function\n"
        "simt_switch:\n"
        "	pushq %rbp\n"
        "	pushq %rbx\n"
        "	pushq %r12\n"
        "	pushq %r13\n"
        "	pushq %r14\n"
        "	pushq %r15\n"
        "	movq %rsp, (%rdi)\n"
        "	movq %rsi, %rsp\n"
        "	popq %r15\n"
        "	popq %r14\n"
        "	popq %r13\n"
        "	popq %r12\n"
        "	popq %rbx\n"
        "	popq %rbp\n"
        "	ret\n"
        ".size simt_switch, .-simt_switch\n"
        ".globl simt_begin\n"
        ".type simt_begin, @function\n"
        "simt_begin:\n"
        "	movq %rbx, %rdi\n"
        "	callq *%r12\n"
        "	ud2\n"
        ".size simt_begin, .-simt_begin\n");
extern "C" void simt_begin(void);

static void prepare(struct simt_fiber *f)
{
	uintptr_t *top = (uintptr_t *)((char *)f->stack + STACK);

	*--top = 0; /* the end of the frames */
	*--top = 0;
	*--top = (uintptr_t)simt_begin;
	*--top = 0;                     /* rbp */
	*--top = (uintptr_t)f;          /* rbx */
	*--top = (uintptr_t)fiber_main; /* r12 */
	for (int i = 0; i < 3; i++)
		*--top = 0;
	f->sp = top;
}

#else

#include <ucontext.h>

/* sp is a ucontext_t of its own. */
static void simt_switch(void **from, void *to)
{
	ucontext_t here;

	*from = &here;
	swapcontext(&here, (ucontext_t *)to);
}

static void begin(unsigned int lo, unsigned int hi)
{
	fiber_main((struct simt_fiber *)((uintptr_t)hi << 32 | lo));
}

static void prepare(struct simt_fiber *f)
{
	ucontext_t *u = (ucontext_t *)f->stack; /* the far end, which a stack reaches last */

	getcontext(u);
	u->uc_stack.ss_sp = (char *)f->stack + sizeof(*u);
	u->uc_stack.ss_size = STACK - sizeof(*u);
	u->uc_link = NULL;
	makecontext(
	        u, (void (*)(void))begin, 2, (unsigned int)(uintptr_t)f, (unsigned int)((uintptr_t)f >> 32));
	f->sp = u;
}

#endif

void simt_fiber_init(struct simt_fiber *f, void (*run)(void *arg), void *arg)
{
	char *p = (char *)mmap(NULL, STACK + GUARD, PROT_READ | PROT_WRITE,
	        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED || mprotect(p, GUARD, PROT_NONE)) {
		perror("simt: a fiber's stack");
		abort();
	}
	f->stack = p + GUARD;
	f->fake = f->tsan = NULL;
	f->run = run;
	f->arg = arg;
#ifdef TSAN
	f->tsan = __tsan_create_fiber(0);
#endif
	prepare(f);
}

void simt_fiber_finish(struct simt_fiber *f)
{
#ifdef TSAN
	__tsan_destroy_fiber(f->tsan);
#endif
	munmap((char *)f->stack - GUARD, STACK + GUARD);
}

void simt_fiber_enter(struct simt_home *home, struct simt_fiber *f)
{
	home_now = home;
#ifdef TSAN
	home->tsan = __tsan_get_current_fiber();
#endif
	before(&home->fake, f->stack, STACK, f->tsan);
	simt_switch(&home->sp, f->sp);
	after(home->fake, NULL, NULL);
}

void simt_fiber_leave(struct simt_home *home, struct simt_fiber *f)
{
	before(&f->fake, home->bottom, home->size, home->tsan);
	simt_switch(&f->sp, home->sp);
	after(f->fake, &home->bottom, &home->size);
}

void simt_order_release(void *at)
{
#ifdef TSAN
	__tsan_release(at);
#endif
}

void simt_order_acquire(void *at)
{
#ifdef TSAN
	__tsan_acquire(at);
#endif
}

void simt_watch_read(const void *at)
{
#ifdef TSAN
	__tsan_read16((void *)at);
#endif
}

void simt_watch_write(void *at)
{
#ifdef TSAN
	__tsan_write16(at);
#endif
}
