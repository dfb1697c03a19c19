// SPDX-License-Identifier: GPL-2.0
/*
 * How a CPU that Linux believes to be dead wakes somebody: by an interrupt of
 * a vector that Linux has given us on some CPU of its own, as a device would.
 */
#include <linux/interrupt.h>
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/numa.h>
#include <linux/wait.h>
#include <asm/apic.h>
#include <asm/hw_irq.h>
#include <asm/irqdomain.h>

#include "vm.h"

static int number;

static irqreturn_t somebody_is_done(int irq, void *data)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		struct basalt_cpu *ours = per_cpu_ptr(&basalt_cpus, cpu);

		if (ours->vcpu)
			wake_up(&ours->wait);
	}
	basalt_servers_look();
	return IRQ_HANDLED;
}

/**
 * basalt_wake_command() - what a CPU writes to its x2APIC's ICR to wake somebody
 *
 * As of now: Linux moves the interrupt when it takes the CPU offline that has it.
 *
 * Return: that.
 */
u64 basalt_wake_command(void)
{
	/* All 32 bits of the destination; a message has room for them only where both sides agree on it. */
	const struct irq_cfg *where = irqd_cfg(irq_get_irq_data(number));

	return (u64)where->dest_apicid << 32 | (apic->dest_mode_logical ? APIC_DEST_LOGICAL : 0) | APIC_DM_FIXED |
	       where->vector;
}

/**
 * basalt_wake_init() - takes a vector
 *
 * Return: 0, or why there is none.
 */
int basalt_wake_init(void)
{
	struct irq_alloc_info info = { .mask = cpu_possible_mask };
	unsigned int cpu;
	int error;

	for_each_possible_cpu(cpu)
		init_waitqueue_head(&per_cpu(basalt_cpus, cpu).wait);
	number = irq_domain_alloc_irqs(x86_vector_domain, 1, NUMA_NO_NODE, &info);
	if (number <= 0)
		return number ? number : -ENOSPC;
	irq_set_handler(number, handle_edge_irq);
	error = request_irq(number, somebody_is_done, IRQF_NO_THREAD, "basalt", NULL);
	if (error)
		irq_dispose_mapping(number);
	return error;
}

/**
 * basalt_wake_exit() - gives it back
 */
void basalt_wake_exit(void)
{
	free_irq(number, NULL);
	irq_dispose_mapping(number);
}
