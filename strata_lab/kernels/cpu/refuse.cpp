// The only places of this folder that throw (see refuse.h).

#include "refuse.h"

#include <c10/util/Exception.h>

namespace strata {

// Of the constructors of torch's errors these take no stack trace.
void refuse_value(const std::string& sentence) { throw c10::ValueError(sentence, c10::Backtrace(), nullptr); }
void refuse_index(const std::string& sentence) { throw c10::IndexError(sentence, c10::Backtrace(), nullptr); }

}  // namespace strata
