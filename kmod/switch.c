// SPDX-License-Identifier: GPL-2.0
/*
 * A guest has a server run in its place, on its CPU: one VMMCALL in, and one of
 * the server's out again, with nothing of Linux between them. On a CPU that
 * Linux believes to be dead: the same holds as in parked.c.
 *
 *   the guest              here                                  the server
 *   VMMCALL (ENTER) -----> RUNS, its FPU for the guest's
 *                          VMRUN, with interrupts on ----------> goes on behind its VMMCALL
 *                          an interrupt, an NMI <--------------- or in the midst of something
 *                          or VMMCALL (WAIT) <------------------
 *                          the guest's FPU, WAITS or PAUSED
 *   goes on, RAX says <---
 *
 * The guest's registers, its control block and its APIC stay as they are
 * meanwhile. An interrupt that waits is delivered as soon as the guest is back.
 */
#include <linux/compiler.h>
#include <linux/smp.h>
#include <asm/msr-index.h>
#include <asm/svm.h>
#include <asm/tsc.h>

#include "svm.h"
#include "vm.h"

#define X2APIC_FIRST	0x800
#define X2APIC_LAST	0x8ff

/* Whoever has it run it is not to. */
static bool notrace is_over(const struct basalt_cpu *self, const struct basalt_vcpu *guest,
			    const struct basalt_server *server)
{
	return READ_ONCE(guest->stop) || READ_ONCE(guest->nmi) || READ_ONCE(server->stop) ||
	       READ_ONCE(self->state) != BASALT_CPU_PARKED;
}

/* It has no APIC any more. Tells whether the last exit was about that. */
static bool notrace do_apic(struct basalt_vcpu *vcpu)
{
	struct vmcb *vmcb = vcpu->vmcb;
	u32 index = vcpu->regs.rcx;

	if (vmcb->control.exit_code != SVM_EXIT_MSR || index < X2APIC_FIRST || index > X2APIC_LAST)
		return false;
	vcpu->run->counts[BASALT_COUNT_MSR]++;
	vcpu->run->counts[BASALT_COUNT_REFUSED]++;
	if (!vmcb->control.exit_info_1) {
		vmcb->save.rax = 0;
		vcpu->regs.rdx = 0;
	}
	vmcb->save.rip += 2;
	vmcb->control.int_state &= ~SVM_INTERRUPT_SHADOW_MASK;
	return true;
}

/* What user space has to look at. */
static u64 notrace ask(struct basalt_vcpu *vcpu, int *next)
{
	vcpu->answer = vcpu->run->reason;
	if (vcpu->answer == BASALT_EXIT_SHUTDOWN || vcpu->answer == BASALT_EXIT_FAILED) {
		*next = BASALT_SERVER_ENDED;
		return BASALT_ENTERED_GONE;
	}
	*next = BASALT_SERVER_ASKS;
	return BASALT_ENTERED_BUSY;
}

/* Until it waits, or is not to run any more; what it does next is in @next. */
static u64 notrace run(struct basalt_cpu *self, const struct basalt_vcpu *guest, struct basalt_server *server, int *next)
{
	struct basalt_vcpu *vcpu = server->vcpu;

	*next = BASALT_SERVER_PAUSED;
	for (;;) {
		/* As in basalt_svm_run(). */
		asm volatile("clgi" : : : "memory");
		if (is_over(self, guest, server) || READ_ONCE(server->late) == READ_ONCE(server->since)) {
			asm volatile("stgi" : : : "memory");
			return is_over(self, guest, server) ? BASALT_ENTERED_INTERRUPTED : BASALT_ENTERED_LATE;
		}
		/* They come when VMRUN lets them, and end the server's run (15.21.1). */
		asm volatile("sti" : : : "memory");
		basalt_svm_step(self, vcpu);
		switch (vcpu->vmcb->control.exit_code) {
		case SVM_EXIT_INTR:
			return BASALT_ENTERED_INTERRUPTED;
		case SVM_EXIT_HLT:
		case SVM_EXIT_MONITOR:
		case SVM_EXIT_MWAIT:
		case SVM_EXIT_MWAIT_COND:
			return BASALT_ENTERED_HALTED;
		}
		if (do_apic(vcpu) || !basalt_svm_handle(self, vcpu))
			continue;
		if (vcpu->run->reason == BASALT_EXIT_HYPERCALL && vcpu->vmcb->save.rax == BASALT_CALL_WAIT) {
			*next = BASALT_SERVER_WAITS;
			return BASALT_ENTERED_DONE;
		}
		return ask(vcpu, next);
	}
}

/* What the CPU remembers of addresses is another server's, or of before this one was elsewhere. */
static void notrace bring(struct basalt_cpu *self, struct basalt_server *server)
{
	unsigned int cpu = raw_smp_processor_id();

	if (self->server != server->id || server->cpu != cpu)
		server->vcpu->vmcb->control.tlb_ctl = TLB_CONTROL_FLUSH_ALL_ASID;
	self->server = server->id;
	WRITE_ONCE(server->cpu, cpu);
	/* Pairs with basalt_pull_once(). */
	smp_store_release(&server->since, rdtsc());
}

/**
 * basalt_switch() - runs the server that a guest wants to enter
 * @self: what is known of this CPU
 * @guest: whose CPU it is
 *
 * Return: one of BASALT_ENTERED_*.
 */
u64 notrace basalt_switch(struct basalt_cpu *self, struct basalt_vcpu *guest)
{
	struct basalt_server *server = guest->regs.rcx < BASALT_MAX_LINKS ? guest->links[guest->regs.rcx] : NULL;
	struct basalt_vcpu *vcpu;
	int state, next;
	u64 outcome;

	if (!server)
		return BASALT_ENTERED_NONE;
	state = READ_ONCE(server->state);
	if (state == BASALT_SERVER_ENDED)
		return BASALT_ENTERED_GONE;
	if (state != BASALT_SERVER_WAITS && state != BASALT_SERVER_PAUSED)
		return BASALT_ENTERED_BUSY;
	/* From here on it is as whoever has had it has left it. */
	if (cmpxchg(&server->state, state, BASALT_SERVER_RUNS) != state)
		return BASALT_ENTERED_BUSY;
	vcpu = server->vcpu;
	bring(self, server);
	if (state == BASALT_SERVER_WAITS)
		vcpu->vmcb->save.rax = 0;
	basalt_fpu_save(self, guest->aside);
	basalt_fpu_load(self, server->context);
	basalt_predict_nothing();
	basalt_svm_finish(vcpu);
	outcome = run(self, guest, server, &next);
	basalt_fpu_save(self, server->context);
	basalt_fpu_load(self, guest->aside);
	basalt_predict_nothing();
	WRITE_ONCE(server->since, 0);
	/* Whoever takes it next finds it as it is now. */
	smp_store_release(&server->state, next);
	if (next == BASALT_SERVER_ASKS || next == BASALT_SERVER_ENDED) {
		/* As in basalt_play_dead(). */
		mb();
		basalt_svm_wake(self->wake);
	}
	return outcome;
}
