/* SPDX-License-Identifier: GPL-2.0 */
/* Where enter.S finds a guest's registers in struct basalt_regs; svm.c compares. The others are in the VMCB. */
#ifndef _BASALT_REGS_H
#define _BASALT_REGS_H

#define BASALT_RBX	8
#define BASALT_RCX	16
#define BASALT_RDX	24
#define BASALT_RSI	32
#define BASALT_RDI	40
#define BASALT_RBP	56
#define BASALT_R8	64
#define BASALT_R9	72
#define BASALT_R10	80
#define BASALT_R11	88
#define BASALT_R12	96
#define BASALT_R13	104
#define BASALT_R14	112
#define BASALT_R15	120

#endif
