// SPDX-License-Identifier: GPL-2.0
/*
 * What timers, interrupts, model-specific registers and doorbells cost the CPU that uses them, in ticks of the TSC: the same code on a
 * host and in its guests. A file for each operation, /proc/basalt_probe/NAME: who reads it has the operation done so often as the
 * parameter samples says, and a little more often at first, and reads the least and the median of what it took, and how often it was
 * done in all.
 *
 * Knows nothing of the operations but what probe.h says.
 */
#include <linux/cpu.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/sort.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>
#include <asm/msr.h>
#include <asm/tsc.h>

#include "probe.h"

static unsigned int samples = 1000;
module_param(samples, uint, 0444);
MODULE_PARM_DESC(samples, "how often an operation is done");

static unsigned int cpus = UINT_MAX;
module_param(cpus, uint, 0444);
MODULE_PARM_DESC(cpus, "how many CPUs take part, the first that are online; the last of them is measured");

/* Not counted: what is slow the first time. */
#define WARM_UP		16
#define MOST_SAMPLES	1000000
/* How long other CPUs are left alone before a sample, in microseconds. */
#define REST_US		300

static DEFINE_MUTEX(one_at_a_time);
static struct proc_dir_entry *directory;

/* What the measured CPU is given to do. */
struct order {
	const struct operation *operation;
	struct probe *probe;
	u64 *ticks;
};

u64 ticks_of_ms(unsigned int ms)
{
	return (u64)tsc_khz * ms;
}

static void rest(void)
{
	u64 until = rdtsc() + div_u64((u64)tsc_khz * REST_US, 1000);

	while (rdtsc() < until)
		barrier();
}

static long carry_out(void *argument)
{
	struct order *order = argument;
	unsigned int done;
	u64 ignored;
	int error;

	for (done = 0; done < WARM_UP + samples; done++) {
		u64 *ticks = done < WARM_UP ? &ignored : &order->ticks[done - WARM_UP];

		if (order->operation->rests)
			rest();
		error = order->operation->sample(order->probe, ticks);
		if (error)
			return error;
		cond_resched();
	}
	return 0;
}

static int busy(void *unused)
{
	while (!kthread_should_stop()) {
		unsigned int turns;

		for (turns = 0; turns < 1000; turns++)
			barrier();
		cond_resched();
	}
	return 0;
}

static void stop_busy(struct task_struct **threads)
{
	unsigned int cpu;

	for (cpu = 0; cpu < nr_cpu_ids; cpu++)
		if (threads[cpu])
			kthread_stop(threads[cpu]);
	kfree(threads);
}

/* A thread on each other CPU that has it do nothing, without halting. */
static struct task_struct **start_busy(const struct probe *probe)
{
	struct task_struct **threads = kcalloc(nr_cpu_ids, sizeof(*threads), GFP_KERNEL);
	struct task_struct *thread;
	unsigned int cpu;

	if (!threads)
		return ERR_PTR(-ENOMEM);
	for_each_cpu(cpu, probe->others) {
		thread = kthread_create_on_cpu(busy, NULL, cpu, "basalt_probe/%u");
		if (IS_ERR(thread)) {
			stop_busy(threads);
			return ERR_CAST(thread);
		}
		threads[cpu] = thread;
		wake_up_process(thread);
	}
	return threads;
}

static int among_others(struct order *order)
{
	struct task_struct **threads;
	int error;

	if (!order->operation->busy)
		return work_on_cpu(order->probe->cpu, carry_out, order);
	threads = start_busy(order->probe);
	if (IS_ERR(threads))
		return PTR_ERR(threads);
	error = work_on_cpu(order->probe->cpu, carry_out, order);
	stop_busy(threads);
	return error;
}

static int measure(struct order *order)
{
	const struct operation *operation = order->operation;
	struct probe *probe = order->probe;
	unsigned int cpu, count = 0;
	int error;

	for_each_online_cpu(cpu) {
		if (count++ == cpus)
			break;
		cpumask_set_cpu(cpu, probe->others);
		probe->peer = probe->cpu;
		probe->cpu = cpu;
	}
	cpumask_clear_cpu(probe->cpu, probe->others);
	if (operation->crowd && cpumask_empty(probe->others))
		return -ENODEV;
	if (operation->begin) {
		error = operation->begin(probe);
		if (error)
			return error;
	}
	error = among_others(order);
	if (operation->end)
		operation->end(probe);
	return error;
}

static int compare(const void *left, const void *right)
{
	u64 a = *(const u64 *)left, b = *(const u64 *)right;

	return a < b ? -1 : a > b;
}

static int show(struct seq_file *file, void *unused)
{
	struct probe probe = {};
	struct order order = { .operation = file->private, .probe = &probe };
	int error;

	if (!zalloc_cpumask_var(&probe.others, GFP_KERNEL))
		return -ENOMEM;
	order.ticks = vcalloc(samples, sizeof(*order.ticks));
	if (!order.ticks) {
		free_cpumask_var(probe.others);
		return -ENOMEM;
	}
	mutex_lock(&one_at_a_time);
	cpus_read_lock();
	error = measure(&order);
	cpus_read_unlock();
	mutex_unlock(&one_at_a_time);
	if (!error) {
		sort(order.ticks, samples, sizeof(*order.ticks), compare, NULL);
		seq_printf(file, "%llu %llu %u\n", order.ticks[0], order.ticks[samples / 2],
			   WARM_UP + samples);
	}
	vfree(order.ticks);
	free_cpumask_var(probe.others);
	return error;
}

static int offer(const struct operation *operations)
{
	for (; operations->name; operations++)
		if (!proc_create_single_data(operations->name, 0400, directory, show, (void *)operations))
			return -ENOMEM;
	return 0;
}

static int __init probe_init(void)
{
	static const struct operation * const all[] = {
		register_operations, timer_operations, interrupt_operations, virtio_operations,
	};
	unsigned int index;
	int error;

	if (!samples || samples > MOST_SAMPLES || !cpus)
		return -EINVAL;
	directory = proc_mkdir("basalt_probe", NULL);
	if (!directory)
		return -ENOMEM;
	for (index = 0; index < ARRAY_SIZE(all); index++) {
		error = offer(all[index]);
		if (error) {
			proc_remove(directory);
			return error;
		}
	}
	return 0;
}

static void __exit probe_exit(void)
{
	proc_remove(directory);
}

module_init(probe_init);
module_exit(probe_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("What timers, interrupts and registers cost, on hosts and in guests");
