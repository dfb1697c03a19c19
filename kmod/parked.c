// SPDX-License-Identifier: GPL-2.0
/*
 * On a CPU that Linux believes to be dead.
 *
 * Nothing here may print, trace, take part in RCU, or use what is patched into
 * code at run time: whoever patches or flushes asks only CPUs that are online.
 * So this file is compiled without tracing, and calls nobody but what a dead
 * CPU runs anyway.
 */
#include <linux/compiler.h>
#include <linux/percpu.h>
#include <linux/smp.h>
#include <asm/irqflags.h>
#include <asm/special_insns.h>

#include "vm.h"

DEFINE_PER_CPU(struct basalt_cpu, basalt_cpus);

/* What a CPU did before there was this module. Does not return. */
void (*basalt_saved_play_dead)(void);

/* The part of it that tells the others that this CPU is gone. */
void (*basalt_play_dead_common)(void);

/* Until INIT: as Linux leaves a CPU that has neither MWAIT nor an idle driver. */
static void notrace __noreturn wait_for_init(void)
{
	for (;;) {
		wbinvd();
		native_halt();
	}
}

/**
 * basalt_play_dead() - what a CPU does that Linux has taken offline
 *
 * Instead of smp_ops.play_dead, with interrupts off, on the stack of the CPU's
 * idle task. One that nobody has claimed goes on as ever. One that was claimed
 * waits for orders, which an NMI makes it look at; Linux's own handler returns
 * at once on a CPU that is offline.
 */
void notrace basalt_play_dead(void)
{
	struct basalt_cpu *self = this_cpu_ptr(&basalt_cpus);

	if (READ_ONCE(self->state) != BASALT_CPU_CLAIMED) {
		basalt_saved_play_dead();
		wait_for_init();
	}
	basalt_play_dead_common();
	/* Whoever has waited for this for too long waits no more. */
	if (cmpxchg(&self->state, BASALT_CPU_CLAIMED, BASALT_CPU_PARKED) != BASALT_CPU_CLAIMED)
		wait_for_init();
	/* As whoever takes it back has left it. An NMI between the look and the halt is lost: it is sent again. */
	while (smp_load_acquire(&self->state) == BASALT_CPU_PARKED) {
		/* The vCPU is as whoever has ordered it has left it. */
		if (smp_load_acquire(&self->order) != BASALT_ORDER_RUN) {
			native_halt();
			continue;
		}
		/* Whoever has waited for this for too long waits no more. */
		if (cmpxchg(&self->order, BASALT_ORDER_RUN, BASALT_ORDER_RUNNING) != BASALT_ORDER_RUN)
			continue;
		basalt_svm_run(self, self->vcpu);
		/* Whoever waits finds what the vCPU came out with. */
		smp_store_release(&self->order, BASALT_ORDER_NONE);
		/* A write to the ICR may be seen before what was stored (16.11.1). */
		mb();
		basalt_svm_wake(self->wake);
	}
	if (self->enabled)
		basalt_svm_leave(self);
	/* Nothing of ours is done here any more. */
	smp_store_release(&self->state, BASALT_CPU_LEFT);
	wait_for_init();
}
