/*
 * Compiled once (a precompiled header) and given by cc.sh to each compilation in which it cannot change the result: the headers of
 * the ACPI interpreter, whose many small files have flags and headers of their own.
 * It holds no code. Loading it costs time too, by its size, hence several.
 */
#include <linux/compiler-version.h>
#include <linux/kconfig.h>
#include <linux/compiler_types.h>

/* kbuild gives these to each file on the command line; here they only have to exist. names.h replaces them. */
#define KBUILD_MODNAME "common"
#define KBUILD_BASENAME "common"
#define KBUILD_MODFILE "common"

#include <acpi/acpi.h>
#include "accommon.h"
#include "acnamesp.h"
#include "acinterp.h"
#include "acparser.h"
#include "amlcode.h"
#include "acdispat.h"
#include "acevents.h"
#include "actables.h"
#include "acdebug.h"
#include "acresrc.h"
