// SPDX-License-Identifier: GPL-2.0
/*
 * How a CPU gets from Linux to us and back.
 *
 * Linux gives it up by its own CPU hotplug, which moves tasks, interrupts,
 * timers and callbacks away; where the CPU would then halt for ever, it comes
 * to parked.c instead. It goes back as it would have come back from there: by
 * INIT and SIPI of Linux's own.
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched/signal.h>

#include "compat.h"
#include "vm.h"

/* A CPU needs microseconds for each step; one that needs longer does not come any more. */
#define STEP_LIMIT_MS	5000

/* Between one NMI and the next. */
#define NMI_AGAIN_US	200

/* Between one look at a CPU that runs a guest and the next, without being told. */
#define LOOK_AGAIN	(HZ / 10)

/* As NMI_AGAIN_US, for a CPU that halts: it answers at once, but an emulated one when its host lets it. */
#define NMI_SOON_US	5

/*
 * How long a host that ends waits for a CPU, where no clock may be asked: an
 * emulated one, or one of a host that is a guest itself, may have to wait for
 * a processor.
 */
#define END_LIMIT_US	1000000
#define END_LOOK_US	10

/* Whoever changes whose a CPU is holds it. */
static DEFINE_MUTEX(claims);

/* The state of CPU hotplug that keeps others from bringing a claimed CPU online. */
static int guard;

static int state_of(unsigned int cpu)
{
	/* What was done before a step is seen by who sees the step. */
	return smp_load_acquire(&per_cpu(basalt_cpus, cpu).state);
}

static void set_state(unsigned int cpu, int state)
{
	/* As in state_of(). */
	smp_store_release(&per_cpu(basalt_cpus, cpu).state, state);
}

/* Waits for a step that the CPU itself makes; with @nmi it is woken for that. */
static bool reaches(unsigned int cpu, int state, bool nmi)
{
	ktime_t end = ktime_add_ms(ktime_get(), STEP_LIMIT_MS);

	while (state_of(cpu) != state) {
		if (ktime_after(ktime_get(), end))
			return false;
		if (nmi)
			basalt_send_nmi(cpu);
		usleep_range(NMI_AGAIN_US / 2, NMI_AGAIN_US);
	}
	return true;
}

/* Linux's again. One that does not come back executes what is here, so the module stays for ever. */
static void release(unsigned int cpu)
{
	int error;

	set_state(cpu, BASALT_CPU_LEAVING);
	if (!reaches(cpu, BASALT_CPU_LEFT, true)) {
		pr_err(BASALT "CPU %u does not leave: it is lost until the next boot\n", cpu);
		__module_get(THIS_MODULE);
		return;
	}
	error = add_cpu(cpu);
	if (error) {
		pr_err(BASALT "CPU %u does not come back (%d): writing 1 to /sys/devices/system/cpu/cpu%u/online tries again\n",
		       cpu, error, cpu);
		__module_get(THIS_MODULE);
	}
	set_state(cpu, BASALT_CPU_LINUX);
}

static int claim(unsigned int cpu)
{
	int error;

	if (cpu >= nr_cpu_ids || !cpu_online(cpu))
		return -ENODEV;
	if (state_of(cpu) != BASALT_CPU_LINUX)
		return -EBUSY;
	set_state(cpu, BASALT_CPU_CLAIMED);
	error = remove_cpu(cpu);
	if (error) {
		/* -EPERM: this one cannot be taken away. 1: it was gone already. */
		set_state(cpu, BASALT_CPU_LINUX);
		return -EBUSY;
	}
	if (!reaches(cpu, BASALT_CPU_PARKED, false)) {
		pr_err(BASALT "CPU %u went offline, but not to us\n", cpu);
		set_state(cpu, BASALT_CPU_LINUX);
		add_cpu(cpu);
		return -EIO;
	}
	return 0;
}

/**
 * basalt_claim_cpus() - takes all of these CPUs from Linux, or none
 * @cpus: which
 * @failed: where the one is written that could not be had
 *
 * Return: 0; -ENODEV for one that is not online; -EBUSY for one that is
 * claimed, or that Linux does not give; -EIO for one that did not arrive.
 */
int basalt_claim_cpus(const struct cpumask *cpus, unsigned int *failed)
{
	unsigned int cpu, before;
	int error = 0;

	mutex_lock(&claims);
	for_each_cpu(cpu, cpus) {
		error = claim(cpu);
		if (error)
			break;
	}
	if (error) {
		*failed = cpu;
		for_each_cpu(before, cpus) {
			if (before == cpu)
				break;
			release(before);
		}
	}
	mutex_unlock(&claims);
	return error;
}

/**
 * basalt_release_cpus() - gives claimed CPUs back
 * @cpus: which
 */
void basalt_release_cpus(const struct cpumask *cpus)
{
	unsigned int cpu;

	mutex_lock(&claims);
	for_each_cpu(cpu, cpus) {
		if (state_of(cpu) == BASALT_CPU_PARKED)
			release(cpu);
	}
	mutex_unlock(&claims);
}

/**
 * basalt_any_claimed() - whether a CPU is not Linux's
 *
 * Return: as of now; anybody may claim one at once.
 */
bool basalt_any_claimed(void)
{
	unsigned int cpu;

	for_each_possible_cpu(cpu) {
		if (state_of(cpu) != BASALT_CPU_LINUX)
			return true;
	}
	return false;
}

/**
 * basalt_abandon_cpus() - sends all claimed CPUs to where dead ones wait
 *
 * For a host that ends, in any context: it takes no lock, and does not wait
 * for what cannot be waited for.
 */
void basalt_abandon_cpus(void)
{
	unsigned int cpu, waited;

	for_each_possible_cpu(cpu) {
		if (state_of(cpu) != BASALT_CPU_PARKED)
			continue;
		set_state(cpu, BASALT_CPU_LEAVING);
		for (waited = 0; waited < END_LIMIT_US && state_of(cpu) == BASALT_CPU_LEAVING; waited += END_LOOK_US) {
			if (waited % NMI_AGAIN_US == 0)
				basalt_send_nmi(cpu);
			udelay(END_LOOK_US);
		}
		if (state_of(cpu) == BASALT_CPU_LEAVING)
			pr_err(BASALT "CPU %u does not leave its guest before the host ends\n", cpu);
		else
			pr_info(BASALT "CPU %u has left its guest, as the host ends\n", cpu);
	}
}

/**
 * basalt_cpu_take() - gives a vCPU its CPU
 * @vcpu: which; the CPU is one of a claim that somebody holds
 *
 * Return: 0, or -EEXIST if another vCPU has it.
 */
int basalt_cpu_take(struct basalt_vcpu *vcpu)
{
	struct basalt_cpu *cpu = per_cpu_ptr(&basalt_cpus, vcpu->cpu);
	int error = 0;

	mutex_lock(&claims);
	if (state_of(vcpu->cpu) != BASALT_CPU_PARKED)
		error = -ENODEV;
	else if (cpu->vcpu)
		error = -EEXIST;
	else
		cpu->vcpu = vcpu;
	mutex_unlock(&claims);
	return error;
}

/**
 * basalt_cpu_forget() - takes it away again
 * @vcpu: which; it does not run
 */
void basalt_cpu_forget(struct basalt_vcpu *vcpu)
{
	mutex_lock(&claims);
	per_cpu(basalt_cpus, vcpu->cpu).vcpu = NULL;
	mutex_unlock(&claims);
}

/* Its vCPU is out, and its page says why. */
static bool is_idle(struct basalt_cpu *cpu)
{
	/* Pairs with the release in basalt_play_dead(). */
	return smp_load_acquire(&cpu->order) == BASALT_ORDER_NONE;
}

/*
 * Gives up a CPU that has not come out of its guest in all that time: a
 * process that waited for it could not be killed. What the CPU may still use
 * stays until the next boot: the vCPU, the machine's memory and tables, this
 * module. If it ever comes out it goes to where dead ones wait, and may be
 * brought online by hand.
 */
static void lose(struct basalt_vcpu *vcpu)
{
	vcpu->lost = true;
	WRITE_ONCE(vcpu->vm->lost, true);
	__module_get(THIS_MODULE);
	cmpxchg(&per_cpu(basalt_cpus, vcpu->cpu).state, BASALT_CPU_PARKED, BASALT_CPU_LOST);
	pr_err(BASALT "CPU %u does not come out of its guest: it is lost until the next boot, with the guest's memory\n",
	       vcpu->cpu);
}

/* Pulls a vCPU out; tells whether it came. */
static bool pull(struct basalt_vcpu *vcpu, struct basalt_cpu *cpu)
{
	ktime_t end = ktime_add_ms(ktime_get(), STEP_LIMIT_MS);

	WRITE_ONCE(vcpu->stop, true);
	while (!is_idle(cpu)) {
		if (ktime_after(ktime_get(), end))
			return false;
		basalt_send_nmi(vcpu->cpu);
		usleep_range(NMI_AGAIN_US / 2, NMI_AGAIN_US);
	}
	WRITE_ONCE(vcpu->stop, false);
	return true;
}

/**
 * basalt_cpu_run() - has a CPU run its vCPU, and waits until it comes out
 * @vcpu: which; its lock is held
 *
 * Return: 0, with why in its page; -EINTR after a signal, when it has come out
 * for that; -EIO if the CPU does not hear, and if it did not before. Anything
 * but a guest's run has STEP_LIMIT_MS, and as long again until the CPU is lost.
 */
int basalt_cpu_run(struct basalt_vcpu *vcpu)
{
	struct basalt_cpu *cpu = per_cpu_ptr(&basalt_cpus, vcpu->cpu);
	unsigned int pause = NMI_SOON_US;
	ktime_t end;
	long left;

	if (vcpu->lost)
		return -EIO;
	cpu->wake = basalt_wake_command();
	/* Whoever takes the order sees the vCPU as it is now, and pairs so in basalt_play_dead(). */
	smp_store_release(&cpu->order, BASALT_ORDER_RUN);
	end = ktime_add_ms(ktime_get(), STEP_LIMIT_MS);
	/* It halts until an NMI comes, and may not have halted when the first one came. */
	while (smp_load_acquire(&cpu->order) == BASALT_ORDER_RUN) {
		if (ktime_after(ktime_get(), end) &&
		    cmpxchg(&cpu->order, BASALT_ORDER_RUN, BASALT_ORDER_NONE) == BASALT_ORDER_RUN)
			return -EIO;
		basalt_send_nmi(vcpu->cpu);
		if (pause < NMI_AGAIN_US) {
			udelay(pause);
			pause *= 2;
		} else {
			usleep_range(NMI_AGAIN_US / 2, NMI_AGAIN_US);
		}
	}
	end = ktime_add_ms(ktime_get(), STEP_LIMIT_MS);
	do {
		/* Linux may have moved the interrupt that wakes. */
		WRITE_ONCE(cpu->wake, basalt_wake_command());
		left = wait_event_interruptible_timeout(cpu->wait, is_idle(cpu), LOOK_AGAIN);
		/* A guest runs as long as it likes; a context is read or written at once. */
	} while (!left && (vcpu->job == BASALT_JOB_RUN || ktime_before(ktime_get(), end)));
	if (left > 0)
		return 0;
	if (!pull(vcpu, cpu)) {
		lose(vcpu);
		return -EIO;
	}
	return vcpu->answer == BASALT_EXIT_INTERRUPTED ? -EINTR : 0;
}

/* Before a CPU is brought online, by whomever. */
static int may_come(unsigned int cpu)
{
	int state = state_of(cpu);

	return state == BASALT_CPU_LINUX || state == BASALT_CPU_LEFT ? 0 : -EBUSY;
}

/**
 * basalt_claims_init() - makes Linux's dead CPUs come to us
 *
 * Return: 0; -EOPNOTSUPP where this kernel does not tell how a CPU dies, or
 * has what we do not bear.
 */
int basalt_claims_init(void)
{
	const char *hindrance = basalt_hindrance();
	int error;

	if (hindrance) {
		pr_err(BASALT "this host has %s, and a claimed CPU does not work with that\n", hindrance);
		return -EOPNOTSUPP;
	}
	basalt_play_dead_common = (void *)basalt_address_of("play_dead_common");
	if (!basalt_play_dead_common) {
		pr_err(BASALT "this kernel has no play_dead_common: it is one that nobody has tried yet\n");
		return -EOPNOTSUPP;
	}
	error = cpuhp_setup_state_nocalls(CPUHP_BP_PREPARE_DYN, "basalt:claimed", may_come, NULL);
	if (error < 0)
		return error;
	guard = error;
	basalt_swallow_init();
	basalt_fpu_init();
	basalt_predict_init();
	basalt_svm_init();
	cpus_read_lock();
	basalt_saved_play_dead = smp_ops.play_dead;
	WRITE_ONCE(smp_ops.play_dead, basalt_play_dead);
	cpus_read_unlock();
	return 0;
}

/**
 * basalt_claims_exit() - and as before again; nothing is claimed any more
 */
void basalt_claims_exit(void)
{
	cpus_read_lock();
	WRITE_ONCE(smp_ops.play_dead, basalt_saved_play_dead);
	cpus_read_unlock();
	cpuhp_remove_state_nocalls(guard);
}
