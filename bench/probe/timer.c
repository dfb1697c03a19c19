// SPDX-License-Identifier: GPL-2.0
/*
 * The local APIC's timer, in the mode in which Linux has it: setting it, and having it expire at once. The tracepoint of its handler
 * says when that was reached; Linux's own handler sets the timer anew for whatever Linux wants.
 */
#include <linux/irqflags.h>
#include <linux/smp.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <linux/workqueue.h>
#include <asm/apic.h>
#include <asm/msr.h>

#include "probe.h"

#define ENTRY	"local_timer_entry"

static struct tracepoint *entry;
/* When the handler was reached on the measured CPU, or 0. */
static u64 entered;
static unsigned int measured;
/* Linux uses it in the same mode on all CPUs. */
static u32 mode;

static void on_entry(void *data, int vector)
{
	if (raw_smp_processor_id() == READ_ONCE(measured) && !READ_ONCE(entered))
		WRITE_ONCE(entered, rdtsc_ordered());
}

static void find_entry(struct tracepoint *point, void *data)
{
	if (!strcmp(point->name, ENTRY))
		entry = point;
}

/* On the measured CPU, of which it is asked whether Linux uses the timer at all. */
static long look(void *unused)
{
	u32 lvtt = apic_read(APIC_LVTT);

	mode = lvtt & (APIC_LVT_TIMER_PERIODIC | APIC_LVT_TIMER_TSCDEADLINE);
	return lvtt & APIC_LVT_MASKED ? -ENODEV : 0;
}

static int find_mode(struct probe *probe)
{
	return work_on_cpu(probe->cpu, look, NULL);
}

static int follow(struct probe *probe)
{
	int error = find_mode(probe);

	if (error)
		return error;
	for_each_kernel_tracepoint(find_entry, NULL);
	if (!entry)
		return -ENOENT;
	WRITE_ONCE(measured, probe->cpu);
	return tracepoint_probe_register(entry, on_entry, NULL);
}

static void unfollow(struct probe *probe)
{
	tracepoint_probe_unregister(entry, on_entry, NULL);
	tracepoint_synchronize_unregister();
}

static void set(u64 value)
{
	if (mode == APIC_LVT_TIMER_TSCDEADLINE)
		wrmsrl(MSR_IA32_TSC_DEADLINE, value);
	else
		apic_write(APIC_TMICT, (u32)value);
}

/* What has to be set for the timer to go on as it did. */
static u64 left(void)
{
	u64 deadline;

	switch (mode) {
	case APIC_LVT_TIMER_TSCDEADLINE:
		rdmsrl(MSR_IA32_TSC_DEADLINE, deadline);
		return deadline;
	case APIC_LVT_TIMER_PERIODIC:
		return apic_read(APIC_TMICT);
	default:
		/* An emulated one may be at its end and not have interrupted yet, which 0 would keep it from for ever. */
		return max(apic_read(APIC_TMCCT), 1U);
	}
}

/* Setting it to what it has left, which is read before. */
static int program(struct probe *probe, u64 *ticks)
{
	unsigned long flags;
	u64 start, value;

	local_irq_save(flags);
	value = left();
	start = rdtsc_ordered();
	set(value);
	*ticks = rdtsc_ordered() - start;
	local_irq_restore(flags);
	return 0;
}

/* From before the timer is set until its handler is reached, and until the code goes on that it has interrupted. */
static int expire(u64 *reached, u64 *back)
{
	unsigned long flags;
	u64 start, now;

	local_irq_save(flags);
	WRITE_ONCE(entered, 0);
	start = rdtsc_ordered();
	/* The least that is not "never". */
	set(mode == APIC_LVT_TIMER_TSCDEADLINE ? start + 1 : 1);
	local_irq_restore(flags);
	do {
		*reached = READ_ONCE(entered);
		now = rdtsc_ordered();
		if (now - start > ticks_of_ms(PATIENCE_MS))
			return -ETIMEDOUT;
	} while (!*reached);
	*reached -= start;
	*back = now - start;
	return 0;
}

static int to_handler(struct probe *probe, u64 *ticks)
{
	u64 back;

	return expire(ticks, &back);
}

static int and_back(struct probe *probe, u64 *ticks)
{
	u64 reached;

	return expire(&reached, ticks);
}

const struct operation timer_operations[] = {
	{ .name = "timer-set", .begin = find_mode, .sample = program },
	{ .name = "timer-interrupt", .begin = follow, .sample = to_handler, .end = unfollow },
	{ .name = "timer-and-back", .begin = follow, .sample = and_back, .end = unfollow },
	{ }
};
