// SPDX-License-Identifier: GPL-2.0
/*
 * Interrupts from one CPU to others and to itself, as Linux sends them: until all have answered. "-busy" where the others run something,
 * as opposed to waiting for work in whatever way they do.
 */
#include <linux/irq_work.h>
#include <linux/preempt.h>
#include <linux/smp.h>
#include <asm/msr.h>

#include "probe.h"

/* None but these two take part. */
static int leave_others(struct probe *probe)
{
	cpumask_copy(probe->others, cpumask_of(probe->peer));
	return 0;
}

static void answer(void *unused)
{
}

static int one(struct probe *probe, u64 *ticks)
{
	u64 start;
	int error;

	preempt_disable();
	start = rdtsc_ordered();
	error = smp_call_function_single(probe->peer, answer, NULL, 1);
	*ticks = rdtsc_ordered() - start;
	preempt_enable();
	return error;
}

static int all(struct probe *probe, u64 *ticks)
{
	u64 start;

	preempt_disable();
	start = rdtsc_ordered();
	smp_call_function_many(probe->others, answer, NULL, true);
	*ticks = rdtsc_ordered() - start;
	preempt_enable();
	return 0;
}

/* When its interrupt was handled, or 0. */
static u64 handled;

static void handle(struct irq_work *work)
{
	WRITE_ONCE(handled, rdtsc_ordered());
}

static DEFINE_IRQ_WORK(to_self, handle);

static int self(struct probe *probe, u64 *ticks)
{
	u64 start, end;

	preempt_disable();
	WRITE_ONCE(handled, 0);
	start = rdtsc_ordered();
	irq_work_queue(&to_self);
	do {
		end = READ_ONCE(handled);
	} while (!end && rdtsc_ordered() - start < ticks_of_ms(PATIENCE_MS));
	preempt_enable();
	/* It may not go before its work is over. */
	irq_work_sync(&to_self);
	if (!end)
		return -ETIMEDOUT;
	*ticks = end - start;
	return 0;
}

const struct operation interrupt_operations[] = {
	{ .name = "ipi-self", .sample = self },
	{ .name = "ipi", .crowd = true, .rests = true, .begin = leave_others, .sample = one },
	{ .name = "ipi-busy", .crowd = true, .busy = true, .begin = leave_others, .sample = one },
	{ .name = "broadcast", .crowd = true, .rests = true, .sample = all },
	{ .name = "broadcast-busy", .crowd = true, .busy = true, .sample = all },
	{ }
};
